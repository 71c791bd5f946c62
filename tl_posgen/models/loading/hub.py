"""A model's files in the Hub's cache."""

from pathlib import Path

from tl_posgen.models.conversion.source import official_name


def drop_from_cache(name: str, revision: str | None = None, cache: Path | None = None) -> int:
    """Delete a model's files at one revision from the Hub's cache, those of other revisions stay; bytes freed."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        known = scan_cache_dir(cache)
    except CacheNotFound:
        return 0
    name, wanted = official_name(name), revision or "main"
    found = [
        one.commit_hash
        for repo in known.repos
        if repo.repo_id == name and repo.repo_type == "model"
        for one in repo.revisions
        if wanted in one.refs or one.commit_hash == wanted
    ]
    plan = known.delete_revisions(*found)
    plan.execute()
    return plan.expected_freed_size
