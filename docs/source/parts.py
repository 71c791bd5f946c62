"""What README and docs show: each part of it, its settings and options."""

from making import (
    OPTIONS,
    analysis,
    benchmark,
    claims,
    demo,
    encodings,
    findings,
    found_by_each,
    greedy,
    joining_of_seeds,
    joining_over_training,
    one_by_one,
    other_end,
    places_compared,
    some_claims,
    token_wise,
    toy,
    training,
    training_of_seeds,
    weighted,
    width,
    widths_chosen,
)
from part import CUT, OTHERS, Part

from tl_posgen.stats.beyond_inits import FEWEST_INITS
from tl_posgen.studies.emergence import MEASURES

SLASH = ("slash", "slash_planes", "slash_ablation")
OF_SLASH = (*SLASH, "slash_transfer", "cone")
SEEDS = {
    "measures": ("three_axis", "variance", "mean_key", "residual", "across_prompts", "slash"),
    "n_prompts": 8,
    "null_seeds": (0, 1, 2, 3, 4),
}
CLAIMED = {"null_seeds": (0, 1, 2)}
REAL = ("SmolLM2-135M-Instruct", "Gemma 3 270M")
REAL_CUT = {"measures": ("variance", "three_axis", "mean_key", "loss"), "length": 512, "n_prompts": 4}
SLASH_CLAIMS = tuple(f"slash {one}" for one in ("1", "2", "3a", "3b", "3c", "4", "6"))
COUPLING_CLAIMS = tuple(f"coupling {one}" for one in (1, 2, 3))
REAL_CLAIMS = {  # those that took minutes
    REAL[0]: (*(f"position {one}" for one in (1, "1b", 3, 4, 5, "5b", "7a")), *SLASH_CLAIMS, *COUPLING_CLAIMS),
    REAL[1]: (*(f"position {one}" for one in (1, "1b", 3, 4, "7a")),),
}
DISTANCE = {"measures": ("dummy_distance",), "null_seeds": (0, 1, 2)}
PLANES = {
    "measures": ("perturbed planes",),
    "length": 128,
    "n_prompts": 8,
    "null_seeds": (0, 1),
    "options": repr(OPTIONS["perturbed planes"]),
}
JOINING = {
    "measures": ("plane_interaction", "profiles", "key_cut"),
    "n_prompts": 8,
    "null_seeds": tuple(range(FEWEST_INITS)),
    "options": repr(OPTIONS["profiles"]),
}
LITERATURE = {**JOINING, "measures": ("literature",), "options": repr(OPTIONS["literature"])}
SOURCES = {
    "measures": ("checked sources",),
    "n_prompts": 8,
    "null_seeds": (0, 1, 2),
    "options": repr(OPTIONS["checked sources"]),
}
RULED = {"measures": ("rules",), "n_prompts": 8, "null_seeds": (0, 1, 2)}
PLACES = {"measures": ("places", "across_prompts"), "length": 128, "n_prompts": 16, "null_seeds": (0, 1, 2)}
FORECAST = {"measures": ("forecast",), "n_prompts": 4, "null_seeds": (0,), "options": repr(OPTIONS["forecast"])}
SHORT = {"measures": ("plane_interaction",), "length": 64, "n_prompts": 8, "null_seeds": tuple(range(FEWEST_INITS))}
TOYS = {
    "all, 3": {"distance": 3, "planes": "all"},
    "medium and high, 3": {"distance": 3, "planes": "high_medium"},
    "low third, 3": {"distance": 3, "planes": "low"},
    "all, 1": {"distance": 1, "planes": "all"},
    "all, 10": {"distance": 10, "planes": "all"},
}
BENCHMARKS = {
    "three_axis": {},
    "streaming": {},
    "slash": {"arguments": ("--rounds", "5")},
    "coupling": {"arguments": ("--repeats", "5")},
    "memory": {"arguments": ("--sizes", "284M", "1B", "--backends", "bridge", "hooked")},
    "sweep": {},
    "first_figure": {},
    "gpu": {"arguments": ("--lengths", "1024", "4096", "--rounds", "3")},
    "waits": {},
    "sums": {},
    "intervals": {},
}
PARTS = {
    "demo": Part("mini", {"length": 512, "n_prompts": 4}, demo),
    "demo results": Part("mini", {"length": 512, "measures": ("variance", "three_axis", "mean_key", "loss")}, analysis),
    "measures": Part("mini", {"length": 128, "n_prompts": 4, "null_seeds": (0,)}, one_by_one, found_by_each),
    "mini claims": Part("mini", {"checkpoints": True, **CLAIMED}, claims),
    "stories260K claims": Part("stories260K", CLAIMED, claims),
    "babyllama105 claims": Part("babyllama105", CLAIMED, claims),
    **{f"{name} analysis": Part(name, REAL_CUT, analysis) for name in REAL},
    **{
        f"{name} claims": Part(name, {"length": 128, "n_prompts": 4, "null_seeds": (0,), "claims": named}, some_claims)
        for name, named in REAL_CLAIMS.items()
    },
    "mini distance": Part("mini", DISTANCE, analysis),
    "stories260K distance": Part("stories260K", DISTANCE, analysis),
    "babyllama105 distance": Part("babyllama105", DISTANCE, analysis),
    **{f"{name} seeds": Part(name, SEEDS, analysis) for name in ("mini", "stories260K", "babyllama105")},
    "mini slash": Part("mini", {"measures": (*SLASH, "planes")}, analysis),
    "stories260K slash": Part("stories260K", {"measures": (*SLASH, "planes")}, analysis),
    "babyllama105 slash": Part("babyllama105", {"measures": (*OF_SLASH, "coupling")}, analysis),
    "atome slash": Part("atome_vanilla_1m", {"measures": (*OF_SLASH, "residual", "across_prompts")}, analysis),
    **{f"{name} planes": Part(name, PLANES, analysis) for name in ("mini", "stories260K", "babyllama105")},
    **{f"{name} joining": Part(name, JOINING, analysis) for name in ("mini", "stories260K", "babyllama105")},
    **{f"{name} literature": Part(name, LITERATURE, analysis) for name in ("mini", "stories260K", "babyllama105")},
    "mini joining emergence": Part(
        "mini", {**JOINING, "n_prompts": 4, "null_seeds": (0, 1, 2), "options": ""}, joining_over_training
    ),
    **{f"{name} sources": Part(name, SOURCES, analysis) for name in ("mini", "stories260K", "babyllama105")},
    "mini writers": Part("mini", {**CUT, "measures": ("writers",), "options": repr(OPTIONS["writers"])}, analysis),
    **{f"{name} rules": Part(name, RULED, analysis) for name in ("mini", "stories260K", "babyllama105")},
    **{
        f"{name} places": Part(name, PLACES, analysis, places_compared)
        for name in ("mini", "stories260K", "atome_vanilla_1m")
    },
    **{f"{name} forecast": Part(name, FORECAST, analysis) for name in ("mini", "stories260K", "babyllama105")},
    **{f"{name} joining short": Part(name, SHORT, analysis) for name in ("mini", "stories260K", "babyllama105")},
    "mini cloze": Part("mini", {"measures": ("cloze",), "options": repr(OPTIONS["cloze"])}, analysis),
    "mini emergence": Part("mini", {"measures": (*MEASURES, "coupling")}, training),
    "rope joining seeds": Part(
        "",
        {"rope_seeds": (0, 1, 2), **{key: JOINING[key] for key in ("measures", "n_prompts", "options")}},
        joining_of_seeds,
    ),
    "mini emergence seeds": Part("", {"training_seeds": (1, 2, 3)}, training_of_seeds),
    "encodings": Part("", {"steps": 1000, "windows": 32}, encodings),
    "mini greedy": Part("mini", {"tokens": 40, "prompt": "Alice was beginning to get very tired"}, greedy),
    "width alone": Part("", {"width_per_k": 8}, width),
    "token-wise": Part("stories260K", {"tokens": 10}, token_wise),
    **{f"toy {name}": Part("", settings, toy) for name, settings in TOYS.items()},
    **{
        f"{name} weighted": Part(name, {"others": OTHERS, "null_seeds": (0,)}, weighted, widths_chosen)
        for name in ("mini", "stories260K", "babyllama105")
    },
    "findings": Part("", {"file": "examples/shapes/findings.py", "models": 9}, findings),
    "mini other end": Part("mini", {"n_prompts": 16, "null_seeds": ()}, other_end),
    **{
        f"benchmark {name}": Part("", {"file": f"benchmarks/{name}.py", **more}, benchmark)
        for name, more in BENCHMARKS.items()
    },
}
