// Draws every formula of a page with KaTeX, which docs/source/notebooks.py puts beside it.
document.addEventListener("DOMContentLoaded", () => {
  for (const element of document.querySelectorAll(".arithmatex")) {
    const text = element.textContent.trim()
    katex.render(text.slice(2, -2), element, { displayMode: text.startsWith("\\["), throwOnError: true })
  }
})
