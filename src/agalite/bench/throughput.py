"""`agalite bench throughput`: how fast the parts are, each against the machine's own limit."""

from pathlib import Path

from agalite import errors, files


def run(*, models: bool, envs: bool, craftax: bool, rounds: int, out: Path | None) -> None:
    errors.integer("rounds", rounds, minimum=1)
    if models == envs:
        raise ValueError("choose what to measure: either --models or --envs")
    if out is not None:
        files.check_writable("out", out)
    if models:
        from agalite.bench import models as model_bench

        model_bench.run(rounds=rounds, out=out)
    else:
        from agalite.bench import environments

        environments.run(rounds=rounds, craftax=craftax, out=out)
