// Draws every formula of a page with KaTeX, which docs/source/notebooks.py puts beside it; a click on a picture
// opens it; what is typed above a table leaves the rows that have it.
document.addEventListener("DOMContentLoaded", () => {
  for (const element of document.querySelectorAll(".arithmatex")) {
    const text = element.textContent.trim()
    katex.render(text.slice(2, -2), element, { displayMode: text.startsWith("\\["), throwOnError: true })
  }
  for (const image of document.querySelectorAll(".md-content img")) {
    if (image.closest("a")) continue
    const link = Object.assign(document.createElement("a"), { href: image.src, className: "zoom", title: "open the picture" })
    image.replaceWith(link)
    link.append(image)
  }
  for (const field of document.querySelectorAll("input.filter")) {
    const rows = [...field.closest(".md-content").querySelectorAll("tbody tr")]
    field.addEventListener("input", () => {
      for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(field.value.toLowerCase())
    })
  }
})
