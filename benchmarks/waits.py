"""Count the host's waits for an accelerator, and the kernels that it starts, in a forward pass that is measured.

    python benchmarks/waits.py [--length 64]

Counted on the simulated CUDA device of the tests (tests/devices/simulated; g++ is needed), with the bundled model of
four layers: an analysis of 6 prompts less one of 2, by 4. Waits are what a real device would be waited for: item,
tolist, a tensor as a condition, results of unknown size, copies to the host that are needed at once. Copies of small
arrays to the device, for which CUDA may wait too, are not counted.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

WAYS: dict[str, dict[str, Any]] = {
    "default measures": {},
    "default measures, streamed": {"streaming": True},
    "three_axis": {"measures": "three_axis"},
    "variance": {"measures": "variance"},
    "mean_key": {"measures": "mean_key"},
    "slash": {"measures": "slash"},
    "residual": {"measures": "residual"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=64)
    options = parser.parse_args()
    from devices import simulated

    simulated.cuda()
    import tl_posgen
    from tl_posgen.models.tokens import bundled_text

    model = tl_posgen.load_model("mini", "hooked", device="cuda")
    print(f"mini, {model.cfg.n_layers} layers, {options.length} tokens: a prompt")
    print(f"{'measures':28} {'waits':>9} {'a layer':>9} {'kernels':>9}")
    for name, way in WAYS.items():
        counts = []
        for n_prompts in (2, 2, 6):  # the first finds out what the layers are
            with simulated.events() as seen:
                cut = {"length": options.length, "n_prompts": n_prompts, "nulls": 0, "progress": False}
                tl_posgen.analyze(model, bundled_text(), **cut, **way)
            counts.append((seen.waits, seen.launches))
        waits, kernels = ((after - before) / 4 for before, after in zip(counts[1], counts[2], strict=True))
        print(f"{name:28} {waits:9.1f} {waits / model.cfg.n_layers:9.2f} {kernels:9.0f}")


if __name__ == "__main__":
    main()
