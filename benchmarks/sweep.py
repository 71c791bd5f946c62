"""Two workers of a sweep against one.

    python benchmarks/sweep.py [--prompts 6] [--texts 3]

Two models, the bundled one and its first checkpoint, on several texts, in processes of one torch thread. Seconds from
a model's first finished job to its last, so that starting and loading are left out: of one worker those of both models
together, of two the longer.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tl_posgen.models.tokens import bundled_text
from tl_posgen.studies.sweep import finished_jobs

CHECKPOINTS = Path(__file__).parents[1] / "examples" / "mini_model" / "checkpoints"
STUDY = """
name = "workers"
length = 512
n_prompts = {prompts}
measures = ["three_axis", "variance", "mean_key", "residual"]
texts = [{texts}]
models = ["mini", {{ name = "{checkpoints}", label = "training", revisions = ["step00000"], tokenizer = "mini" }}]
"""


def written(directory: Path, prompts: int, texts: int) -> Path:
    """The study, and its texts: as many parts of the bundled one."""
    text = bundled_text()
    for number in range(texts):
        part = text[number * len(text) // texts : (number + 1) * len(text) // texts]
        (directory / f"{number}.txt").write_text(part, encoding="utf-8")
    names = ", ".join(f'"{number}.txt"' for number in range(texts))
    path = directory / "study.toml"
    path.write_text(STUDY.format(prompts=prompts, texts=names, checkpoints=CHECKPOINTS), encoding="utf-8")
    return path


def run(study: Path, out: Path, workers: int) -> list[float]:
    """Of each model, the seconds from its first finished job to its last."""
    sweep = [sys.executable, "-W", "ignore", "-m", "tl_posgen", "sweep", str(study), "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    subprocess.run([*sweep, "--workers", str(workers)], env=environment, stdout=subprocess.DEVNULL, check=True)
    ends: dict[str, list[float]] = {}
    for (model, *_), path in finished_jobs(out).items():
        ends.setdefault(model, []).append(path.stat().st_mtime)
    return [max(of_model) - min(of_model) for of_model in ends.values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--texts", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        study = written(Path(directory), options.prompts, options.texts)
        by_one = sum(run(study, Path(directory) / "one", 1))
        print(
            f"2 models, {options.texts - 1} jobs each, {by_one / 2 / (options.texts - 1):.0f} s a job with one worker"
        )
        by_two = max(run(study, Path(directory) / "two", 2))
        print(f"one worker {by_one:.1f} s, two workers {by_two:.1f} s: {by_one / by_two:.2f}", flush=True)


if __name__ == "__main__":
    main()
