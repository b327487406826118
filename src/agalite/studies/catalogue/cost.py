"""Operations and space of one attention head: how many times GTrXL's are AGaLiTe's."""

from agalite.studies.declaration import (
    Between,
    Claim,
    Factor,
    LinePlot,
    Measurement,
    Metric,
    Scale,
    Study,
)

# What is compared, operations, space, and where the paper says so.
_CLAIMS = (
    ("T-Maze, GTrXL-256 / AGaLiTe", 125.1, 36.57, "Section 5, Diagnostic MDP"),
    ("T-Maze, GTrXL-128 / AGaLiTe", 62.67, 18.28, "Section 5, Diagnostic MDP"),
    ("Mystery Path, GTrXL-128 / AGaLiTe-8", 55.75, 9.84, "Section 5, Mystery Path"),
    ("Memory Maze, GTrXL-256 / AGaLiTe", 125.0, 46.0, "Section 5, Memory Maze"),
)

# Space to the digits that the paper gives, which it cuts off. How it counts operations it does not
# say, only that the numbers are rough.
_WITHIN = {"operations": 0.1, "state": 0.015}


def _claim(what: str, column: str, value: float, where: str) -> Claim:
    words = "fewer operations" if column == "operations" else "less space"
    levels = {"comparison": what, "counted": "line by line"}
    return Claim(
        says=f"{what}: for a single head roughly {value:g} times {words}.",
        where=where,
        tests=(
            Between(
                a=levels,
                low=(1 - _WITHIN[column]) * value,
                high=(1 + _WITHIN[column]) * value,
                metric=column,
            ),
        ),
        scales=("paper", "cpu", "smoke"),
    )


STUDIES = (
    Study(
        name="cost",
        title="Operations and space of one head, GTrXL's by AGaLiTe's",
        paper="Section 5, in the text of each experiment; Table 1",
        note="Counted line by line from the algorithms, with the state folded (not in the paper), "
        "and as XLA counts them in the compiled program of one streaming step.",
        kind=Measurement("agalite.studies.measurements:cost"),
        factors=(Factor("head", {"one": {}}),),
        metrics=(
            Metric(column="operations", name="operations, GTrXL / AGaLiTe", exact=True),
            Metric(column="state", name="space, GTrXL / AGaLiTe", exact=True),
        ),
        figures=(
            LinePlot(x="comparison", lines="counted"),
            LinePlot(x="comparison", lines="counted", metric="state"),
        ),
        scales={
            "smoke": Scale(settings={"quick": True}),
            "cpu": Scale(),
            "paper": Scale(),
        },
        claims=tuple(
            _claim(what, column, value, where)
            for what, operations, space, where in _CLAIMS
            for column, value in (("operations", operations), ("state", space))
        ),
    ),
)
