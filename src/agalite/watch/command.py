"""`agalite watch`. Heavy modules are imported when it runs."""

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro.conf

from agalite import extras


@dataclass(frozen=True)
class Watch:
    """Show an episode and what the memory keeps of it, as a web page or a film."""

    run_folder: tyro.conf.Positional[Path]
    """The folder of the run."""
    out: Path
    """The file to write: .html (one file, opens offline in any browser), .gif or .mp4."""
    seed: int = 0
    """Seed of the episode."""
    steps: int = 200
    """Most steps to show, from the episode's first; the time grows with their square."""
    greedy: bool = False
    """Take the most likely action instead of a sampled one."""
    best: bool = False
    """Use the best checkpoint instead of the newest."""
    seed_number: int = 0
    """Which of the run's seeds to use: 0 is the first."""

    def run(self) -> None:
        extras.require_training("agalite watch")
        from agalite.training.policy import open_run
        from agalite.watch.run import check_arguments, watch

        check_arguments(self.out, self.seed, self.steps)
        open_run(self.run_folder, seed_number=self.seed_number)
        print("compiling, playing and computing gradients: about a minute", file=sys.stderr)
        record = watch(
            self.run_folder,
            self.out,
            seed=self.seed,
            steps=self.steps,
            greedy=self.greedy,
            best=self.best,
            seed_number=self.seed_number,
        )
        print(
            f"{record['steps']} steps, return {record['total']:.2f}, {record['ended']}; "
            f"written to {self.out}"
        )
        if record["past"] is not None:
            last = record["past"]["fractions"][-1]
            print(f"{last:.1%} of the gradient came from before the rollout, at the run's end")


COMMANDS = {"watch": Watch}
