"""How long a forward pass takes: one element of a stream, and a whole sequence."""

from agalite.studies.declaration import (
    Better,
    Claim,
    Factor,
    LinePlot,
    Measurement,
    Metric,
    Ratio,
    Scale,
    Study,
)

_MS = Metric(column="ms", name="milliseconds", higher_is_better=False)
_NOTE = (
    "12 layers, 8 heads of 64, d = 256, batch 1, as in the paper; on this machine's CPU, where the "
    "paper had an NVIDIA A100. 'gtrxl' projects its whole memory at every step, as published; "
    "'cached' keeps keys and values. All models are timed in one run, interleaved."
)
_ALWAYS = ("paper", "cpu")

STUDIES = (
    Study(
        name="latency-streaming",
        title="Latency of one element of a stream, against GTrXL's context",
        paper="Appendix K",
        note=_NOTE,
        kind=Measurement("agalite.studies.measurements:latency"),
        factors=(Factor("part", {"stream": {"part": "stream"}}),),
        base={"seconds": 2.0},
        metrics=(_MS,),
        figures=(LinePlot(x="context", lines="model", log=True),),
        scales={
            "smoke": Scale(
                seeds=3,
                settings={
                    "quick": True,
                    "seconds": 0.05,
                    "models": ("agalite(4,1)", "gtrxl-128"),
                },
            ),
            "cpu": Scale(seeds=100),
            "paper": Scale(seeds=100, settings={"seconds": 60.0}),
        },
        claims=(
            Claim(
                says="The gap between GTrXL and AGaLiTe increases dramatically with increasing "
                "context length.",
                where="Appendix K",
                tests=(
                    Ratio(
                        a={"model": "gtrxl", "context": "2048"},
                        b={"model": "gtrxl", "context": "128"},
                        low=2.0,
                        high=float("inf"),
                    ),
                    Ratio(
                        a={"model": "gtrxl", "context": "2048"},
                        b={"model": "agalite(4,1)", "context": "2048"},
                        low=2.0,
                        high=float("inf"),
                    ),
                ),
                scales=_ALWAYS,
            ),
            Claim(
                says="(ours) It stays so with keys and values kept between steps, which the paper "
                "does not measure.",
                where="docs/performance.md",
                tests=(
                    Better(
                        a={"model": "agalite(4,1)", "context": "2048"},
                        b={"model": "gtrxl, cached", "context": "2048"},
                    ),
                ),
                scales=_ALWAYS,
            ),
        ),
    ),
    Study(
        name="latency-sequence",
        title="Latency of a whole sequence, against its length",
        paper="Appendix K",
        note=_NOTE,
        kind=Measurement("agalite.studies.measurements:latency"),
        factors=(Factor("part", {"sequence": {"part": "sequence"}}),),
        base={"seconds": 2.0},
        metrics=(_MS,),
        figures=(LinePlot(x="length", lines="model", log=True),),
        scales={
            "smoke": Scale(
                seeds=3,
                settings={
                    "quick": True,
                    "seconds": 0.05,
                    "models": ("agalite(4,1)",),
                },
            ),
            "cpu": Scale(seeds=100),
            "paper": Scale(seeds=100, settings={"seconds": 60.0}),
        },
        claims=(
            Claim(
                says="The gap between GTrXL and AGaLiTe increases dramatically with increasing "
                "sequence length.",
                where="Appendix K",
                tests=(
                    Ratio(
                        a={"model": "gtrxl-512, cached", "length": "4096"},
                        b={"model": "agalite(4,1)", "length": "4096"},
                        low=1.0,
                        high=float("inf"),
                    ),
                ),
                scales=_ALWAYS,
            ),
        ),
    ),
)
