"""Pictures: labelled numbers in, a plotly Figure or a circuitsvis page out. They know no model and compute nothing.

The view of the result named `x` is the module `tl_posgen.views.x`. `plot(dataset, null, kind=...)` draws one of its
`KINDS`; `drawable(dataset)`, where it exists, names those that this dataset has data for. `show(dataset, example=...)`
makes the token-level page of each of `examples(dataset)`.
"""
