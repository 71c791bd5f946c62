"""Position generalization (Han & Ji 2025, arXiv 2503.13305): measures, and hooks that change positions."""

# ruff: noqa: F403 - the public names are those that each of these packages lists
from tl_posgen.position.decomposition import *
from tl_posgen.position.distance import *
from tl_posgen.position.length import *
from tl_posgen.position.order import *
from tl_posgen.position.planes import *
from tl_posgen.position.substitution import *
