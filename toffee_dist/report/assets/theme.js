// Light or dark: what the system says, until the reader says otherwise.
const theme = {
  dark: () => document.documentElement.dataset.theme
    ? document.documentElement.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches,
  changed: [],
}
document.getElementById("theme").addEventListener("click", () => {
  document.documentElement.dataset.theme = theme.dark() ? "light" : "dark"
  for (const told of theme.changed) told()
})
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const told of theme.changed) told()
})
