"""`agalite export`. Heavy modules are imported when it runs."""

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro.conf

from agalite import extras


@dataclass(frozen=True)
class Export:
    """Write a trained agent to a file that other programs run (ONNX, StableHLO)."""

    run_folder: tyro.conf.Positional[Path]
    """The folder of the run."""
    onnx: Path | None = None
    """The ONNX file to write."""
    stablehlo: Path | None = None
    """The StableHLO file to write, which JAX reads."""
    batch_size: int = 1
    """Agents that act together: the first axis of all inputs and outputs."""
    tolerance: float | None = None
    """Largest difference allowed between the file and the agent; a worse file is not kept. None:
    1e-5, or twice what the agent differs from itself by in a batch, if that is more."""
    best: bool = False
    """Use the best checkpoint instead of the newest."""
    seed_number: int = 0
    """Which of the run's seeds to use: 0 is the first."""

    def run(self) -> None:
        extras.require_training("agalite export")
        from agalite.export.policy import check_arguments, export_run
        from agalite.export.verify import STEPS
        from agalite.training.policy import open_run

        check_arguments(self.onnx, self.stablehlo, self.batch_size, self.tolerance)
        total = open_run(self.run_folder, seed_number=self.seed_number)[1].total_timesteps
        print("compiling, writing and verifying: about a minute", file=sys.stderr)
        for file in export_run(
            self.run_folder,
            onnx=self.onnx,
            stablehlo=self.stablehlo,
            batch_size=self.batch_size,
            tolerance=self.tolerance,
            seed_number=self.seed_number,
            best=self.best,
        ):
            print(
                f"{file.path}: {file.size / 1e6:.1f} MB, the agent after {file.at_step:,} of "
                f"{total:,} steps; {STEPS} steps replayed, "
                f"largest difference {file.difference:.1e}"
            )


COMMANDS = {"export": Export}
