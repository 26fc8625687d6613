// Say which node was chosen, by a click or a search, and draw its trajectory where the page has it.
const at = nodes.selected.indices[0]
if (at != null) {
  const id = nodes.data.id[at]
  note.text = `${id} is chosen.`
  if (path != null) {
    const index = nodes.data.path[at]
    const cut = (all) => index < 0 ? [] : Array.prototype.slice.call(all, index * moments.length, (index + 1) * moments.length)
    path.data = {x: cut(paths.data.x), y: cut(paths.data.y), moment: index < 0 ? [] : moments}
    for (const plot of plots) {
      plot.title.text = index < 0 ? `${id}: not among the trajectories on this page` : id
    }
  }
}
