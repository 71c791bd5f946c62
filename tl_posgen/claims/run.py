"""Everything that the claims are read off, run on one model; finished parts are kept, so an interrupted run goes on."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from tl_posgen.analysis import analyze
from tl_posgen.claims import coupling, position, slash
from tl_posgen.claims.base import Procedure, judged
from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.models.backend import Model
from tl_posgen.models.load import load_model
from tl_posgen.models.origin import origin_of
from tl_posgen.models.provenance import model_label
from tl_posgen.report import Report, prepare_directory
from tl_posgen.results import Result, load, save_results

PAPERS = {"position": position, "slash": slash, "coupling": coupling}


def judge_claims(
    model: Model | str,
    text: str,
    *,
    papers: Sequence[str] = tuple(PAPERS),
    checkpoints: Sequence[str | Path] = (),
    length: int = 256,
    n_prompts: int = 4,
    null_seed: int = 0,
    keep: str | Path = "claims",
    progress: bool = True,
) -> Report:
    """Every claim of the papers on one model: a Report whose first result, "claims", has a row for each.

    Args:
        model: a model, or a name or directory for `load_model`.
        text: long enough for four prompts of four times the training length, for the claims on length.
        papers: any of "position" (Han & Ji 2025), "slash" (Cheng et al. 2026), "coupling" (Aubry et al. 2024).
        checkpoints: directories of the same model in training, in order; without them nothing is said of emergence.
        length, n_prompts: how the text is cut. null_seed: of the randomly initialised model, and of draws.
        keep: directory for finished parts. A later run with the same weights, text and settings takes them up.

    Returns:
        A Report. Verdicts follow criteria of ours, which stand in the table beside them.

    Raises:
        InputError: an unknown paper, or a text too short.

    Source: the claims are the papers'; how each is measured and judged is ours.

    Example:
        >>> import tempfile
        >>> from tl_posgen.models.tokens import bundled_text
        >>> short = {"papers": ["coupling"], "length": 16, "n_prompts": 2, "progress": False}
        >>> with tempfile.TemporaryDirectory() as keep:
        ...     report = judge_claims("mini", bundled_text(), keep=keep, **short)
        >>> report["claims"].frame()["claim"].tolist()
        ['coupling 1', 'coupling 2', 'coupling 3']
    """
    if unknown := [paper for paper in papers if paper not in PAPERS]:
        raise InputError(f"paper {unknown[0]!r}: choose from {', '.join(PAPERS)}")
    if isinstance(model, str):
        model = load_model(model)
    settings = {"weights": digest_of(model), "text": hashlib.sha256(text.encode()).hexdigest()}
    settings |= {"length": length, "n_prompts": n_prompts, "null_seed": null_seed, "backend": origin_of(model).backend}
    settings |= {"versions": {name: version(name) for name in ("tl-posgen", "transformer-lens", "torch")}}
    settings |= {"checkpoints": [str(checkpoint) for checkpoint in checkpoints]}
    cut = {"length": length, "n_prompts": n_prompts, "null_seed": null_seed, "progress": progress}
    procedures: dict[str, Procedure] = {"heads": partial(heads, model, text, cut)}
    for paper in papers:
        procedures |= PAPERS[paper].procedures(model, text, cut, checkpoints)
    results = run_all(procedures, parts_directory(keep, settings), progress)
    every_claim = [claim for paper in papers for claim in PAPERS[paper].CLAIMS]
    provenance = results["three_axis"].provenance
    table = judged(every_claim, results, model_label(model), provenance)
    return Report({"claims": table, **results}, provenance)


def heads(model: Model, text: str, cut: Mapping[str, Any]) -> list[Result]:
    """One forward pass per prompt for everything that is measured head by head."""
    names = ["three_axis", "variance", "mean_key", "slash"]
    return list(analyze(model, text, analyzers=names, examples=0, **cut).results.values())


def run_all(procedures: Mapping[str, Procedure], parts: Path, progress: bool) -> dict[str, Result]:
    """Results of all procedures by name; each procedure's are written when it is done, and read if they were."""
    results: dict[str, Result] = {}
    bar = tqdm(procedures.items(), unit="procedure", disable=not progress)
    for name, procedure in bar:
        bar.set_description(f"claims: {name}")
        path = parts / f"{name}.nc"
        try:
            if not path.is_file():
                save_results({result.name: result for result in procedure()}, path)
            results |= load(path)
        except UnsupportedModelError as reason:
            bar.write(f"left out: {reason}")
    return results


def parts_directory(keep: str | Path, settings: Mapping[str, Any]) -> Path:
    """A directory of these settings' own, so that parts of another model or text are never taken up."""
    digest = hashlib.sha256(json.dumps(dict(settings), sort_keys=True).encode()).hexdigest()[:12]
    return prepare_directory(Path(keep) / f"parts-{digest}")


def digest_of(model: Model) -> str:
    """A fingerprint of the weights."""
    digest = hashlib.sha256()
    with torch.no_grad():
        for name, weight in sorted(model.state_dict().items()):
            digest.update(f"{name} {tuple(weight.shape)} {weight.double().sum()} {weight.double().norm()}".encode())
    return digest.hexdigest()
