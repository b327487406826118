"""Not in the paper: three bases of the approximation with as many state vectors, in T-Maze."""

from agalite.studies.catalogue import tmaze
from agalite.studies.catalogue.agents import LONG_HORIZON
from agalite.studies.declaration import (
    Alike,
    Claim,
    Factor,
    LearningCurves,
    LinePlot,
    Scale,
    Settings,
    Study,
    Training,
)


def _bases(*vectors: int) -> Factor:
    """The cosine bases keep r//2 + 1 vectors (`ops.delta`), slots as many as it has slots."""
    levels: dict[str, Settings] = {}
    for count in vectors:
        for basis, r in (("paper", 2 * count - 1), ("published", 2 * count - 1), ("slots", count)):
            levels[f"{basis}/{count}"] = {"memory_options.basis": basis, "memory_options.r": r}
    return Factor("basis/vectors", levels)


STUDIES = (
    Study(
        name="bases",
        title="Three bases (paper, published, slots) at equal state, in T-Maze",
        paper="ours",
        note="The paper writes its cosines one way, its published code another; slots is this "
        "library's. 'vectors' is the number of value vectors in a head's state.",
        kind=Training(preset="paper"),
        base={
            "env": "tmaze",
            "memory": "agalite",
            "memory_options.eta": 4,
            "memory_options.horizon": LONG_HORIZON,
            "env_options.corridor": 160,
        },
        factors=(_bases(1, 2, 4),),
        metrics=(tmaze.SUCCESS,),
        figures=(
            LinePlot(x="vectors", lines="basis"),
            LearningCurves(lines="basis", panels="vectors"),
        ),
        seed_failures=tmaze.SEED_FAILURES,
        scales={
            "smoke": Scale(
                seeds=1,
                model_size="tiny",
                settings={**tmaze.SMOKE, "env_options.corridor": 4},
                factors=(Factor("basis/vectors", {"slots/2": _bases(2).levels["slots/2"]}),),
            ),
            "cpu": Scale(
                seeds=5,
                seeds_per_run=1,
                preset="published",
                model_size="small",
                settings={**tmaze.CPU_SETTINGS, "env_options.corridor": 200},
                factors=(_bases(1, 4),),
                note="A corridor of 200. " + tmaze.cpu_note(tmaze.LONG_GATES),
            ),
            "paper": Scale(
                seeds=50,
                seeds_per_run=10,
                settings={"total_timesteps": 5_000_000, "agent.learning_rate": 3e-4},
            ),
        },
        claims=(
            Claim(
                says="(ours) With one vector the three bases are alike: the paper's attention does "
                "not depend on the query there.",
                where="findings, section 1",
                tests=tuple(
                    Alike(
                        a={"basis": basis, "vectors": "1"},
                        b={"basis": "paper", "vectors": "1"},
                        within=0.1,
                    )
                    for basis in ("published", "slots")
                ),
                scales=("paper", "cpu"),
            ),
        ),
    ),
)
