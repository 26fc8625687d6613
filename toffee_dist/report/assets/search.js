// Choose the node with this id, and move the map until it is in the middle.
const wanted = cb_obj.value.trim()
const at = nodes.data.id.indexOf(wanted)
if (wanted != "" && at < 0) {
  nodes.selected.indices = []
  note.text = `${wanted} is not among the ${nodes.data.id.length} nodes on this page.`
} else if (at >= 0) {
  nodes.selected.indices = [at]
  for (const [range, value] of [[map.x_range, nodes.data.x[at]], [map.y_range, nodes.data.y[at]]]) {
    const half = (range.end - range.start) / 2
    range.setv({start: value - half, end: value + half})
  }
}
