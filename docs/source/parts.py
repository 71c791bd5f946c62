"""What README and docs show: each part of it, its settings and options."""

from making import (
    CUT,
    LARGE,
    OPTIONS,
    QWEN,
    REAL,
    Part,
    analysis,
    beyond_training,
    by_dtype,
    claims,
    commands,
    demo,
    found_by_each,
    greedy,
    one_by_one,
    rounded_keys,
    timed,
    token_wise,
    toy,
    training,
    training_of_seeds,
    verdicts_by_null,
    width,
)

from tl_posgen.studies.emergence import MEASURES

SLASH = ("slash", "slash_planes", "slash_ablation")
OF_SLASH = (*SLASH, "slash_transfer", "cone")
SEEDS = {
    "measures": ("three_axis", "variance", "mean_key", "residual", "slash"),
    "n_prompts": 8,
    "nulls": 5,
}
CLAIMED = {"nulls": 3, "papers": ("position", "slash", "coupling")}
GAP = repr(OPTIONS["gap"])
BIASES = ("bias_pairs", "bias_ablation", "slash_biases", "cone")
OF_512 = {"length": 512, "nulls": 1}
TOO_SHORT = {"length": 256, "n_prompts": 1, "nulls": 0}  # the slowest quarter of the planes hardly turns
HALF_A_RADIAN = {"length": 2816, "nulls": 1}  # which SmolLM2's slowest quarter turns by
QUARTERS = {"mini": OF_512, REAL[0]: HALF_A_RADIAN, REAL[1]: OF_512, QWEN: TOO_SHORT}
RECALLED = ("frequency 4", "frequency 12", "frequency 13")  # rows that need copies
REAL_CUT = {"measures": ("variance", "three_axis", "mean_key", "loss"), "length": 512, "n_prompts": 4}
SMALL_CUT = "--length 128 --prompts 4"
_SCORED = ("slash", "sources", "rules", "coupling", "distance", "planes")
_INTERVENED = ("substitute", "perturb", "perturb-planes")
REAL_LINES = (
    "analyze --length 512 --prompts 4",
    *(f"{name} {SMALL_CUT}" for name in (*_SCORED, *_INTERVENED)),
    "explain --prompt 'When Mary and John went to the store, John gave a drink to' --head L5H3",
)
OF_FEW_PASSES = ("position 1", "position 1b", "position 2", "position 2b", "position 3", "position 4", "position 7a")
OF_FEW_PASSES += ("slash 1", "slash 2", "slash 3a", "slash 3b", "slash 3c", "slash 6")
OF_FEW_PASSES += ("coupling 1", "coupling 2", "coupling 3")
OF_ONE_PASS = ("position 1", "position 1b", "position 4")
OF_ONE_PASS += ("slash 1", "slash 2", "slash 3a", "slash 3b", "slash 3c", "slash 6")
REAL_CLAIMS = dict.fromkeys(REAL, ("position", "slash", "coupling")) | {QWEN: OF_FEW_PASSES, LARGE: OF_ONE_PASS}
SINGLE_CLAIMS = (
    *((QWEN, (claim,)) for claim in ("slash 2", "slash 4", "position 5", "position 5b", "coupling 5")),
    (LARGE, ("position 2", "position 2b")),
)
DISTANCE = {"measures": ("dummy_distance",), "nulls": 3}
PLANES = {
    "measures": ("perturbed planes",),
    "length": 128,
    "n_prompts": 8,
    "nulls": 2,
    "options": repr(OPTIONS["perturbed planes"]),
}
SOURCES = {
    "measures": ("checked sources",),
    "n_prompts": 8,
    "nulls": 3,
    "options": repr(OPTIONS["checked sources"]),
}
RULED = {"measures": ("rules",), "n_prompts": 8, "nulls": 3}
PLACES = {"measures": ("places",), "length": 128, "n_prompts": 16, "nulls": 3}
WEIGHTED = {"measures": ("substitution", "three_axis"), "nulls": 1}
TOYS = {
    "all, 3": {"distance": 3, "planes": "all"},
    "medium and high, 3": {"distance": 3, "planes": "high_medium"},
    "low third, 3": {"distance": 3, "planes": "low"},
    "all, 1": {"distance": 1, "planes": "all"},
    "all, 10": {"distance": 10, "planes": "all"},
}
LINES = ("tl-posgen check",)
PARTS = {
    "demo": Part("mini", {"length": 512, "n_prompts": 4}, demo),
    "commands": Part("mini", {"lines": LINES}, commands),
    "demo results": Part("mini", {"length": 512, "measures": ("variance", "three_axis", "mean_key", "loss")}, analysis),
    "measures": Part(REAL[0], {"length": 128, "n_prompts": 4, "nulls": 1}, one_by_one, found_by_each),
    "mini length": Part(
        "mini", {"measures": ("length_extrapolation",), "length": None, "n_prompts": 4}, beyond_training, found_by_each
    ),
    "mini claims": Part("mini", {"checkpoints": True, **CLAIMED}, claims),
    "stories260K claims": Part("stories260K", CLAIMED, claims),
    **{f"{name} analysis": Part(name, REAL_CUT, analysis) for name in (*REAL, QWEN, LARGE)},
    "mini frequencies": Part("mini", {"nulls": 1, "papers": ("frequency",)}, claims),
    **{
        f"{name} frequencies": Part(name, {"length": 256, "nulls": 1, "papers": ("frequency",)}, claims)
        for name in (*REAL, QWEN)
    },
    **{f"{name} quarters": Part(name, {**cut, "papers": ("frequency 11",)}, claims) for name, cut in QUARTERS.items()},
    **{
        f"{name} inits": Part(name, {"length": 256, "nulls": 1, "papers": ("frequency 6",)}, claims)
        for name in ("mini", *REAL)
    },
    **{
        f"{name} recall": Part(name, {"length": length, "nulls": 1, "papers": RECALLED}, claims)
        for name, length in {"mini": 256, REAL[1]: 128, QWEN: 128}.items()
    },
    f"{REAL[0]} gap": Part(
        REAL[0],
        {"measures": ("gap",), "length": 256, "n_prompts": 4, "nulls": 0, "options": GAP},
        analysis,
        found_by_each,
    ),
    f"{REAL[0]} gap nulls": Part(
        REAL[0],
        {
            "measures": ("gap to 1.5 L",),
            "length": 256,
            "n_prompts": 4,
            "nulls": {"random init": (0,), "shuffled": (0,)},
            "options": repr(OPTIONS["gap to 1.5 L"]),
        },
        analysis,
        found_by_each,
    ),
    f"{QWEN} gap": Part(
        QWEN,
        {
            "measures": ("gap of Qwen",),
            "length": 256,
            "n_prompts": 2,
            "nulls": 0,
            "options": repr(OPTIONS["gap of Qwen"]),
        },
        analysis,
        found_by_each,
    ),
    f"{QWEN} gap nulls": Part(
        QWEN,
        {
            "measures": ("gap of Qwen to 1.5 L",),
            "length": 256,
            "n_prompts": 2,
            "nulls": {"random init": (0,), "shuffled": (0,)},
            "options": repr(OPTIONS["gap of Qwen to 1.5 L"]),
        },
        analysis,
        found_by_each,
    ),
    f"{QWEN} biases": Part(QWEN, {"measures": BIASES, "length": 128, "n_prompts": 4}, analysis, found_by_each),
    **{
        f"{name} sinks": Part(
            name,
            {"measures": ("substitution",), "length": 128, "n_prompts": 4, "nulls": 1},
            analysis,
            found_by_each,
        )
        for name in (*REAL, QWEN)
    },
    **{
        f"{name} shuffled tokens": Part(
            name,
            {"measures": ("slash_transfer",), "length": 128, "n_prompts": 4, "nulls": {"shuffled": (0,)}},
            analysis,
        )
        for name in REAL
    },
    **{
        f"{name} dtypes": Part(name, {"length": 128, "n_prompts": 4, "dtypes": ("float32", "bfloat16")}, by_dtype)
        for name in (*REAL, QWEN)
    },
    f"{QWEN} rounded keys": Part(QWEN, {"length": 128, "n_prompts": 4, "layer": 0, "heads": (3, 6)}, rounded_keys),
    f"{QWEN} nulls": Part(
        QWEN, {"length": 128, "n_prompts": 4, "kinds": ("shuffled", "shuffled matrices")}, verdicts_by_null
    ),
    **{f"{name} commands": Part(name, {"lines": REAL_LINES}, timed) for name in REAL},
    f"{QWEN} commands": Part(QWEN, {"lines": (*REAL_LINES, f"frequencies {SMALL_CUT}")}, timed),
    f"{LARGE} commands": Part(LARGE, {"lines": (f"slash {SMALL_CUT}", f"substitute {SMALL_CUT}")}, timed),
    **{
        f"{name} claims": Part(name, {"length": 128, "nulls": 1, "papers": papers}, claims)
        for name, papers in REAL_CLAIMS.items()
    },
    **{
        f"{name} claims of {', '.join(rows)}": Part(name, {"length": 128, "nulls": 1, "papers": rows}, claims)
        for name, rows in SINGLE_CLAIMS
    },
    "mini distance": Part("mini", DISTANCE, analysis),
    "stories260K distance": Part("stories260K", DISTANCE, analysis),
    **{f"{name} seeds": Part(name, SEEDS, analysis) for name in ("mini", "stories260K")},
    "mini slash": Part("mini", {"measures": (*SLASH, "planes")}, analysis),
    "stories260K slash": Part("stories260K", {"measures": (*SLASH, "planes")}, analysis),
    "atome slash": Part("atome_vanilla_1m", {"measures": (*OF_SLASH, "residual")}, analysis),
    **{f"{name} planes": Part(name, PLANES, analysis) for name in ("mini", "stories260K")},
    **{f"{name} sources": Part(name, SOURCES, analysis) for name in ("mini", "stories260K")},
    "mini writers": Part("mini", {**CUT, "measures": ("writers",), "options": repr(OPTIONS["writers"])}, analysis),
    **{f"{name} rules": Part(name, RULED, analysis) for name in ("mini", "stories260K")},
    **{f"{name} places": Part(name, PLACES, analysis) for name in ("mini", "stories260K", "atome_vanilla_1m")},
    "mini cloze": Part("mini", {"measures": ("cloze",), "options": repr(OPTIONS["cloze"])}, analysis),
    "mini emergence": Part("mini", {"measures": (*MEASURES, "coupling")}, training),
    "mini emergence seeds": Part("", {"training_seeds": (1, 2, 3)}, training_of_seeds),
    "mini greedy": Part("mini", {"tokens": 40, "prompt": "Alice was beginning to get very tired"}, greedy),
    "width alone": Part("", {"width_per_k": 8}, width),
    "token-wise": Part("stories260K", {"tokens": 10}, token_wise),
    **{f"toy {name}": Part("", settings, toy) for name, settings in TOYS.items()},
    **{f"{name} weighted": Part(name, WEIGHTED, analysis) for name in ("mini", "stories260K")},
}
