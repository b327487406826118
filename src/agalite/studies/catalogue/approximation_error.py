"""How well AGaLiTe approximates GaLiTe's state, against r and the gates."""

from agalite.studies.declaration import (
    Better,
    Claim,
    Factor,
    Heatmap,
    LinePlot,
    Measurement,
    Metric,
    Scale,
    Study,
    vary,
)

_R = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64)
_GATES = tuple(round(0.05 * i, 2) for i in range(1, 20))


def _bases(*names: str) -> Factor:
    return vary("basis", "basis", names)


STUDIES = (
    Study(
        name="approximation-error",
        title="Error of AGaLiTe's state against r and the gates, four bases",
        paper="Appendix E",
        note="Frobenius norm of C - C~ at step 100, d = 128, constant gates, normal keys and "
        "values. At each r all bases have r//2 + 1 state vectors.",
        kind=Measurement("agalite.studies.measurements:approximation_error"),
        factors=(_bases("paper", "published", "slots", "rank1"),),
        base={"r": _R, "gates": _GATES, "width": 128, "steps": 100},
        metrics=(
            Metric(column="error", name="error (Frobenius norm)", higher_is_better=False),
            Metric(
                column="relative_error",
                name="error / norm of the exact state",
                higher_is_better=False,
            ),
        ),
        figures=(
            Heatmap(x="r", y="gate", panels="basis"),
            LinePlot(x="r", lines="basis", panels="gate", metric="relative_error", log=True),
        ),
        scales={
            "smoke": Scale(
                seeds=4,
                settings={"r": (1, 4, 16), "gates": (0.1, 0.5, 0.9), "width": 16},
                factors=(_bases("paper", "slots"),),
            ),
            "cpu": Scale(
                seeds=50,
                settings={"gates": (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)},
                note="The paper's own size; nine gates.",
            ),
            "paper": Scale(seeds=50),
        },
        claims=(
            Claim(
                says="The error decreases with increasing r.",
                where="Appendix E",
                tests=tuple(
                    Better(
                        a={"basis": "paper", "r": "64", "gate": gate},
                        b={"basis": "paper", "r": "1", "gate": gate},
                    )
                    for gate in ("0.1", "0.5", "0.9")
                ),
                scales=("paper", "cpu"),
            ),
            Claim(
                says="There are periodic bands in the error plot.",
                where="Appendix E",
            ),
            Claim(
                says="(ours) With as many state vectors, slots has a smaller error than the "
                "paper's basis.",
                where="findings, section 1",
                tests=tuple(
                    Better(
                        a={"basis": "slots", "r": "7", "gate": gate},
                        b={"basis": "paper", "r": "7", "gate": gate},
                    )
                    for gate in ("0.1", "0.5", "0.9")
                ),
                scales=("paper", "cpu"),
            ),
        ),
    ),
)
