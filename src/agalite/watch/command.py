"""`agalite watch`. Nothing heavy is imported until it is run."""

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro.conf

from agalite import extras


@dataclass(frozen=True)
class Watch:
    """Show an episode beside what the memory does in it, as a web page or a film.

    agalite watch runs/NAME --out page.html
    """

    run_folder: tyro.conf.Positional[Path]
    """The folder of the run."""
    out: Path
    """The file to write: .html (one file, opens offline in any browser), .gif or .mp4."""
    seed: int = 0
    """Of the episode."""
    steps: int = 200
    """At most so many steps, from the episode's first; the work grows with their square."""
    greedy: bool = False
    """Take the likeliest action instead of a sampled one."""
    best: bool = False
    """Use the best checkpoint instead of the newest."""
    seed_number: int = 0
    """Which of the run's seeds to use: 0 is the first."""

    def run(self) -> None:
        extras.require_training("agalite watch")
        from agalite.watch.run import watch

        print("compiling, playing and looking back: a minute or so", file=sys.stderr)
        story = watch(
            self.run_folder,
            self.out,
            seed=self.seed,
            steps=self.steps,
            greedy=self.greedy,
            best=self.best,
            seed_number=self.seed_number,
        )
        print(
            f"{story['steps']} steps, return {story['total']:.2f}, {story['ended']}; "
            f"written to {self.out}"
        )


COMMANDS = {"watch": Watch}
