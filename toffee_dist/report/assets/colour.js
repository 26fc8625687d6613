// Colour the dots of the map by another column, and show the bar that explains it.
for (const [name, bar] of Object.entries(bars)) {
  bar.visible = name == cb_obj.value
}
dots.glyph.fill_color = {field: cb_obj.value, transform: bars[cb_obj.value].color_mapper}
