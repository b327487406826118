"""Not in the paper: GTrXL with windows shorter and longer than the corridor of the T-Maze."""

from agalite.studies.catalogue import tmaze
from agalite.studies.declaration import (
    Between,
    Claim,
    LinePlot,
    Scale,
    Study,
    Training,
    vary,
)


def _windows(*sizes: int):
    return vary("window", "memory_options.memory", sizes)


STUDIES = (
    Study(
        name="gtrxl-window",
        title="GTrXL's window against the corridor's length, in T-Maze",
        paper="ours",
        note="Each of GTrXL's layers reads a window of M inputs, so that what reaches the last of "
        "L layers can be from M * L steps ago, though no layer sees so far by itself.",
        kind=Training(preset="paper"),
        base={"env": "tmaze", "memory": "gtrxl"},
        factors=(_windows(32, 64, 128, 256), tmaze.corridor(40, 80, 120, 160, 200)),
        metrics=(tmaze.SUCCESS,),
        figures=(LinePlot(x="corridor", lines="window"),),
        seed_failures=tmaze.SEED_FAILURES,
        scales={
            "smoke": Scale(
                seeds=1,
                model_size="tiny",
                settings=tmaze.SMOKE,
                factors=(_windows(8), tmaze.corridor(4)),
            ),
            "cpu": Scale(
                seeds=5,
                seeds_per_run=1,
                preset="published",
                model_size="small",
                settings={**tmaze.CPU_SETTINGS, "total_timesteps": 2_000_000},
                factors=(_windows(8, 16, 32, 64), tmaze.corridor(20, 40)),
                note="Corridors of 20 and 40, windows of 8 to 64, 2M steps, small models.",
            ),
            "paper": Scale(seeds=20, seeds_per_run=10, settings={"total_timesteps": 5_000_000}),
        },
        claims=(
            Claim(
                says="(ours) A window that holds the whole corridor is enough.",
                where="the paper's claim on GTrXL-256, at other lengths",
                tests=(Between(a={"window": "64", "corridor": "20"}, low=0.9, high=1.0),),
                scales=("cpu",),
            ),
            Claim(
                says="(ours) Layers times window shorter than the corridor: chance.",
                where="the paper's claim on GTrXL-128, at other lengths",
                tests=(Between(a={"window": "8", "corridor": "40"}, low=0.35, high=0.65),),
                scales=("cpu",),
            ),
        ),
    ),
)
