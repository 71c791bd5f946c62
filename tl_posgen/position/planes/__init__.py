"""RoPE's planes: magnitude and phase of queries and keys, what planes carry and cost, and what they could express."""

from tl_posgen.position.planes.numbers.inverse_dft import fit_frequencies, head_for_table
from tl_posgen.position.planes.plane_perturbation import PlanePerturbation
from tl_posgen.position.planes.planes import Planes

__all__ = ["PlanePerturbation", "Planes", "fit_frequencies", "head_for_table"]
