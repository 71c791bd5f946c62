"""Every number and picture of README and docs, regenerated.

    python docs/regenerate.py --measure               # everything; about an hour on one core
    python docs/regenerate.py --measure --model mini  # what needs no models beside the repository
    python docs/regenerate.py --measure --part "mini claims" --again
    python docs/regenerate.py --pages                 # README.md and docs/*.md from docs/source and docs/numbers.json
    python docs/regenerate.py --pictures              # docs/*.png from what was measured
    python docs/regenerate.py --notebooks             # examples/*.ipynb from examples/*.py, run on the mini model
    python docs/regenerate.py --how-to                # what the pages of docs/how_to print and draw, on the mini model
    python docs/regenerate.py --site                  # build/docs, what the site is built from; needs npm

Measuring keeps every finished part in build/numbers, so a second run goes on where the first one stopped. Parts whose
model is not there keep the numbers that they have.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "source"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="measure, and write docs/numbers.json")
    parser.add_argument("--model", action="append", help="only parts of this model; repeat for several")
    parser.add_argument("--part", action="append", help="only this part; repeat for several")
    parser.add_argument("--again", action="store_true", help="measure chosen parts anew")
    parser.add_argument("--pages", action="store_true", help="render README.md and docs/*.md")
    parser.add_argument("--pictures", action="store_true", help="draw docs/*.png; needs chromium")
    parser.add_argument("--notebooks", nargs="*", metavar="NAME", help="run these notebooks, or all; needs chromium")
    parser.add_argument(
        "--how-to", nargs="*", metavar="NAME", help="run these pages of docs/how_to, or all; needs chromium"
    )
    parser.add_argument("--site", action="store_true", help="write build/docs, with notebooks and KaTeX; needs npm")
    chosen = parser.parse_args()
    listed = (chosen.notebooks, chosen.how_to)
    if not (chosen.measure or chosen.pages or chosen.pictures or chosen.site or any(one is not None for one in listed)):
        parser.error("choose --measure, --pages, --pictures, --notebooks, --how-to or --site")
    if chosen.measure:
        from measuring import measure
        from parts import PARTS

        names = [name for name, part in PARTS.items() if not chosen.model or part.model in chosen.model]
        if unknown := set(chosen.part or ()) - set(PARTS):
            parser.error(f"no part {min(unknown)!r}; there are {', '.join(PARTS)}")
        measure([name for name in names if not chosen.part or name in chosen.part], again=chosen.again)
    if chosen.how_to is not None:
        from how_to import write_how_to

        write_how_to(chosen.how_to)
    if chosen.pages:
        from pages import write_pages

        write_pages()
    if chosen.pictures:
        from pictures import draw

        draw()
    if chosen.notebooks is not None:
        from notebooks import write_notebooks

        write_notebooks(chosen.notebooks)
    if chosen.site:
        from notebooks import fetch_katex, write_site

        write_site()
        fetch_katex()


if __name__ == "__main__":
    main()
