// The map of nodes, and time: plays the steps, follows chosen nodes, and asks the server where there is one.
(() => {
const scene = JSON.parse(document.getElementById("scene").textContent)
const $ = (id) => document.getElementById(id)
const bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0))
const numbers = (text) => { const found = bytes(text); return new Int16Array(found.buffer, 0, found.length >> 1) }
const still = matchMedia("(prefers-reduced-motion: reduce)").matches
const MOST = 5, TAIL = 14, UNIT = 32767

// What is drawn: a track per node, over all time (one place) or step by step.

const time = scene.time
const steps = time ? time.labels.length : 0
const tracks = {all: [], time: []}
const cut = (packed, count, each) => {
  const xy = numbers(packed.xy), group = bytes(packed.group), size = packed.size ? bytes(packed.size) : null
  return Array.from({length: count}, (_, i) => ({
    xy: xy.subarray(2 * i * each, 2 * (i + 1) * each),
    group: group.subarray(i * each, (i + 1) * each),
    size: size && size.subarray(i * each, (i + 1) * each),
  }))
}
const about = (index) => ({name: scene.ids[index], degree: scene.degree[index], last: scene.last[index],
  seen: scene.seen[index], why: scene.why[index]})
tracks.all = cut(scene.all, scene.ids.length, 1).map((track, index) => Object.assign(track, about(index)))
if (time) tracks.time = cut(time, time.nodes.length, steps).map((track, i) => Object.assign(track, about(time.nodes[i])))
const named = {all: new Map(tracks.all.map((track) => [track.name, track])), time: new Map(tracks.time.map((track) => [track.name, track]))}

const bounds = (list) => {
  let [left, right, low, high] = [Infinity, -Infinity, Infinity, -Infinity]
  for (const {xy} of list) for (let i = 0; i < xy.length; i += 2) {
    left = Math.min(left, xy[i]); right = Math.max(right, xy[i]); low = Math.min(low, xy[i + 1]); high = Math.max(high, xy[i + 1])
  }
  return {x: (left + right) / 2, y: (low + high) / 2, width: Math.max(right - left, 1), height: Math.max(high - low, 1)}
}
const boxes = {all: bounds(tracks.all), time: bounds(tracks.time)}
const highest = {degree: Math.max(2, ...scene.degree), last: Math.max(1, ...scene.last)}
const counts = []  // of every step, how many nodes are in each community
for (let t = 0; t < steps; t++) {
  const own = new Array(scene.colours.length).fill(0)
  for (const track of tracks.time) own[track.group[t]]++
  counts.push(own)
}

const state = {view: time ? "time" : "all", at: 0, playing: false, colour: "group", speed: 1, lit: null, chosen: [],
  zoom: 1, dx: 0, dy: 0, hover: null, answers: 0}
const step = () => Math.round(state.at)
const place = (track, at) => {
  if (track.xy.length === 2) return [track.xy[0], track.xy[1]]
  const one = Math.floor(at), two = Math.min(one + 1, steps - 1), part = at - one, {xy} = track
  return [xy[2 * one] * (1 - part) + xy[2 * two] * part, xy[2 * one + 1] * (1 - part) + xy[2 * two + 1] * part]
}
const group = (track, at) => track.group[track.group.length === 1 ? 0 : Math.round(at)]

// Colours: those of the page, of communities, and a ramp from dark blue to yellow for numbers.

let css = {}
const readColours = () => {
  const found = getComputedStyle(document.documentElement)
  css = Object.fromEntries(["ink", "soft", "line", "paper", "card", "accent", "mark"].map((name) => [name, found.getPropertyValue(`--${name}`).trim()]))
}
const RAMP = [[0, 60, 120], [60, 90, 125], [124, 123, 120], [187, 165, 95], [253, 215, 55]]
const ramp = (share) => {
  const at = Math.min(Math.max(share, 0), 1) * (RAMP.length - 1), low = Math.min(Math.floor(at), RAMP.length - 2)
  return `rgb(${RAMP[low].map((value, i) => Math.round(value + (RAMP[low + 1][i] - value) * (at - low)))})`
}
const shareOf = (track, name) => name === "degree"
  ? Math.log(Math.max(track.degree, 1)) / Math.log(highest.degree) : Math.max(track.last, 0) / highest.last
const colourOf = (track, at) => state.colour === "group" ? scene.colours[group(track, at)]
  : track.degree == null ? css.soft : ramp(shareOf(track, state.colour))

// The map.

const map = $("map"), strip = $("strip")
const fit = (canvas) => {
  const ratio = devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio)
  }
  const pen = canvas.getContext("2d")
  pen.setTransform(ratio, 0, 0, ratio, 0, 0)
  pen.clearRect(0, 0, width, height)
  return [pen, width, height]
}
const toScreen = ([x, y]) => {
  const box = boxes[state.view], width = map.clientWidth, height = map.clientHeight
  const scale = state.zoom * Math.min((width - 40) / box.width, (height - 40) / box.height)
  return [width / 2 + state.dx + (x - box.x) * scale, height / 2 + state.dy - (y - box.y) * scale]
}
const radius = (track, at) => {
  if (!track.size) return 4
  const one = Math.floor(at), two = Math.min(one + 1, steps - 1)
  const size = (track.size[one] * (1 - (at - one)) + track.size[two] * (at - one)) / 255
  return 1.8 + 7 * Math.sqrt(size) * (tracks.time.length > 600 ? 0.7 : 1)
}
const shown = () => [...tracks[state.view], ...state.chosen.filter((track) => track.fetched && state.view === "time")]
const isChosen = (track) => state.chosen.some((one) => one.name === track.name)

const drawMap = () => {
  const [pen, width, height] = fit(map), at = state.at
  if (!width) return
  if (state.view === "time") for (const track of state.chosen) if (track.size) drawTrail(pen, track, at)
  pen.lineWidth = 0.7
  const faint = state.chosen.length ? 0.45 : 0.82
  for (const track of shown()) {
    const [x, y] = toScreen(place(track, at))
    if (x < -20 || y < -20 || x > width + 20 || y > height + 20) continue
    const off = state.lit != null && state.colour === "group" && group(track, at) !== state.lit
    pen.globalAlpha = off ? 0.1 : faint
    pen.fillStyle = colourOf(track, at)
    pen.beginPath(); pen.arc(x, y, radius(track, at), 0, 7); pen.fill()
    pen.globalAlpha = off ? 0.05 : 0.35
    pen.strokeStyle = css.ink
    pen.stroke()
  }
  pen.globalAlpha = 1
  pen.font = "600 13px system-ui, sans-serif"
  pen.textBaseline = "middle"
  for (const chosen of state.chosen) {
    const track = state.view === "all" ? named.all.get(chosen.name) : chosen.size ? chosen : null
    if (!track) continue
    const [x, y] = toScreen(place(track, at)), r = radius(track, at) + 3
    pen.fillStyle = colourOf(track, at); pen.beginPath(); pen.arc(x, y, r, 0, 7); pen.fill()
    pen.lineWidth = 2.5; pen.strokeStyle = css.ink; pen.stroke()
    const name = chosen.name.length > 28 ? `${chosen.name.slice(0, 27)}…` : chosen.name
    const left = x > width - 150
    pen.textAlign = left ? "right" : "left"
    pen.lineWidth = 4; pen.strokeStyle = css.paper; pen.strokeText(name, x + (left ? -r - 5 : r + 5), y)
    pen.fillStyle = css.ink; pen.fillText(name, x + (left ? -r - 5 : r + 5), y)
  }
  pen.textAlign = "left"
  pen.textBaseline = "alphabetic"
  if (state.view === "time") {
    pen.font = "600 15px system-ui, sans-serif"
    pen.fillStyle = css.soft
    pen.fillText(time.labels[step()], 12, height - 12)
  }
}
const drawTrail = (pen, track, at) => {
  pen.strokeStyle = css.soft; pen.globalAlpha = 0.09; pen.lineWidth = 1
  pen.beginPath()
  for (let t = 0; t < steps; t++) pen.lineTo(...toScreen([track.xy[2 * t], track.xy[2 * t + 1]]))
  pen.stroke()
  const from = Math.max(0, Math.floor(at) - TAIL)
  let last = toScreen(place(track, from))
  for (let t = from + 1; t <= Math.floor(at) + 1; t++) {
    const here = toScreen(place(track, Math.min(t, at)))
    pen.globalAlpha = 0.15 + 0.75 * (t - from) / (TAIL + 1)
    pen.lineWidth = 1 + 2.5 * (t - from) / (TAIL + 1)
    pen.strokeStyle = scene.colours[group(track, Math.min(t, at))]
    pen.beginPath(); pen.moveTo(...last); pen.lineTo(...here); pen.stroke()
    last = here
  }
  pen.globalAlpha = 1
}

// The overview: communities by their share, activity, change, moments, where we are.

const SHARES = [14, 44], ACTS = [62, 30]
const across = (t, width) => steps > 1 ? 2 + t / (steps - 1) * (width - 4) : width / 2
const drawStrip = () => {
  if (!time) return
  const [pen, width] = fit(strip), high = (list) => Math.max(1e-12, ...list)
  if (!width) return
  const most = high(time.activity), turn = high(time.change)
  const wide = Math.max(1, (width - 4) / steps)
  for (let t = 0; t < steps; t++) {
    const left = across(t, width) - wide / 2
    let top = SHARES[0]
    counts[t].forEach((count, index) => {
      const tall = count / tracks.time.length * SHARES[1]
      pen.globalAlpha = state.lit == null || state.lit === index ? 0.9 : 0.15
      pen.fillStyle = scene.colours[index]
      if (tall) pen.fillRect(left, top, wide + 0.5, tall)
      top += tall
    })
    pen.globalAlpha = 0.55
    pen.fillStyle = css.soft
    const tall = time.activity[t] / most * ACTS[1]
    pen.fillRect(left, ACTS[0] + ACTS[1] - tall, Math.max(wide - 0.5, 0.7), tall)
  }
  pen.globalAlpha = 1
  pen.strokeStyle = css.mark; pen.lineWidth = 1.6
  pen.beginPath()
  time.change.forEach((value, t) => { if (t) pen.lineTo(across(t, width), ACTS[0] + ACTS[1] * (1 - value / turn)) })
  pen.stroke()
  pen.fillStyle = css.mark
  for (const t of time.moments) {
    const x = across(t, width)
    pen.beginPath(); pen.moveTo(x - 6, 1); pen.lineTo(x + 6, 1); pen.lineTo(x, 12); pen.fill()
    pen.setLineDash([3, 3]); pen.beginPath(); pen.moveTo(x, 12); pen.lineTo(x, ACTS[0] + ACTS[1]); pen.stroke(); pen.setLineDash([])
  }
  pen.strokeStyle = css.ink; pen.lineWidth = 2
  const x = across(state.at, width)
  pen.beginPath(); pen.moveTo(x, SHARES[0] - 4); pen.lineTo(x, ACTS[0] + ACTS[1] + 2); pen.stroke()
  pen.fillStyle = css.soft; pen.font = "11.5px system-ui, sans-serif"
  const marks = steps < 2 ? [0] : width > 820 ? [0, 0.25, 0.5, 0.75, 1] : width > 420 ? [0, 0.5, 1] : [0, 1]
  for (const share of marks) {
    pen.textAlign = share === 0 ? "left" : share === 1 ? "right" : "center"
    const t = Math.round(share * (steps - 1))
    pen.fillText(time.labels[t], across(t, width), 107)
  }
  pen.textAlign = "left"
}
const drawBands = () => {
  for (const track of state.chosen) {
    if (!track.band || !track.size) continue
    const [pen, width, height] = fit(track.band), wide = Math.max(1, (width - 4) / steps)
    for (let t = 0; t < steps; t++) {
      pen.fillStyle = scene.colours[track.group[t]]
      const tall = height * (0.25 + 0.75 * Math.sqrt(track.size[t] / 255))
      pen.fillRect(across(t, width) - wide / 2, height - tall, wide + 0.5, tall)
    }
    pen.fillStyle = css.ink
    pen.fillRect(across(state.at, width) - 1, 0, 2, height)
  }
}

// Redraw at most once per frame; playing moves on by the time that went by.

let waiting = false, before = 0
const redraw = () => {
  if (waiting) return
  waiting = true
  requestAnimationFrame(draw)
}
const pace = Math.min(Math.max(steps / 30, 2), 12)  // steps per second: all of them in about half a minute
const draw = (now) => {
  waiting = false
  if (state.playing) {
    state.at = Math.min(state.at + Math.min(now - before, 100) / 1000 * pace * state.speed, steps - 1)
    before = now
    if (state.at >= steps - 1) play(false)
    tellStep()
  }
  drawMap(); drawStrip(); drawBands()
  if (state.playing) redraw()
}
const tellStep = () => {
  if (!time) return
  $("slider").value = step()
  $("slider").setAttribute("aria-valuetext", time.labels[step()])
  $("when").textContent = time.labels[step()]
}
const play = (on) => {
  if (!time || steps < 2) return
  if (on && state.view === "all") setView("time")
  if (on && state.at >= steps - 1) state.at = 0
  state.playing = on
  before = performance.now()
  $("play").textContent = on ? "⏸ Pause" : "▶ Play"
  if (!on) { state.at = step(); tellStep(); askLater() }
  redraw()
}
const go = (at) => {
  if (!time) return
  if (state.view === "all") setView("time")
  state.playing = false
  $("play").textContent = "▶ Play"
  state.at = Math.min(Math.max(at, 0), steps - 1)
  tellStep(); redraw(); askLater()
}
const setView = (view) => {
  state.view = view
  $("view").value = view
  state.lit = null; state.zoom = 1; state.dx = state.dy = 0
  if (view === "all") play(false)
  drawKey(); redraw()
}

// What colours mean.

const element = (tag, text = "", name = "") => {
  const made = document.createElement(tag)
  made.textContent = text
  if (name) made.className = name
  return made
}
const swatch = (colour) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", "svg")
  made.setAttribute("viewBox", "0 0 10 10"); made.setAttribute("class", "dot")
  const circle = document.createElementNS("http://www.w3.org/2000/svg", "circle")
  for (const [name, value] of Object.entries({cx: 5, cy: 5, r: 5, fill: colour})) circle.setAttribute(name, value)
  made.append(circle)
  return made
}
const drawKey = () => {
  const key = $("key")
  key.replaceChildren()
  if (state.colour === "group") {
    const most = tracks[state.view].reduce((most, track) => Math.max(most, ...track.group), 0)
    key.append(element("p", state.view === "time" ? "Communities (at the step shown); click one to see it alone" : "Communities; click one to see it alone", "soft"))
    const list = element("div", "", "groups")
    for (let index = 0; index <= most; index++) {
      const button = element("button", String(index + 1))
      button.type = "button"
      button.prepend(swatch(scene.colours[index]))
      button.setAttribute("aria-label", `Community ${index + 1}`)
      button.setAttribute("aria-pressed", String(state.lit === index))
      button.addEventListener("click", () => { state.lit = state.lit === index ? null : index; drawKey(); redraw() })
      list.append(button)
    }
    key.append(list)
    return
  }
  const canvas = element("canvas", "", "ramp")
  key.append(element("p", state.colour === "degree" ? "How many others a node has edges with" : "The step at which a node was last seen", "soft"), canvas)
  const ends = element("div", "", "ends")
  const first = scene.last.indexOf(Math.max(0, Math.min(...scene.last))), last = scene.last.indexOf(highest.last)
  const words = state.colour === "degree" ? ["1", String(highest.degree)] : [scene.seen[first] || "earlier", scene.seen[last] || "later"]
  ends.append(...words.map((word) => element("span", word)))
  key.append(ends)
  const [pen, width, height] = fit(canvas)
  for (let x = 0; x < width; x++) { pen.fillStyle = ramp(x / width); pen.fillRect(x, 0, 1, height) }
}

// Chosen nodes.

const say = (words) => { $("note").textContent = words }
const choose = (track) => {
  if (isChosen(track)) return
  const full = named.time.get(track.name) ?? track
  state.chosen = [...state.chosen, full].slice(-MOST)
  say(full.size || !time ? `${track.name} is chosen.` : `${track.name} is chosen; its steps are not on this page.`)
  drawPicked(); redraw(); askLater()
}
const drop = (track) => {
  state.chosen = state.chosen.filter((one) => one.name !== track.name)
  say(`${track.name} is let go.`)
  drawPicked(); redraw(); askLater()
}
const toggle = (track) => isChosen(track) ? drop(track) : choose(track)
const percent = (share) => `${share < 0 ? "−" : ""}${Math.abs(100 * share).toFixed(0)} %`
const rows = (caption, pairs, linked) => {
  const table = element("table")
  table.append(element("caption", caption))
  for (const [name, value] of pairs) {
    const row = element("tr"), cell = element("td")
    if (linked && (scene.live || named.all.has(name))) {
      const button = element("button", name, "link")
      button.type = "button"
      button.addEventListener("click", () => find(name))
      cell.append(button)
    } else cell.textContent = name
    row.append(cell, element("td", value))
    table.append(row)
  }
  return table
}
const drawPicked = () => {
  $("picked").replaceChildren(...[...state.chosen].reverse().map((track) => {
    const card = element("div", "", "chosen"), head = element("header"), close = element("button", "×")
    close.type = "button"
    close.setAttribute("aria-label", `Let go of ${track.name}`)
    close.addEventListener("click", () => drop(track))
    head.append(element("b", track.name), close)
    card.append(head)
    const facts = [track.degree == null ? "" : `degree ${track.degree.toLocaleString("en")}`, track.seen ? `last seen ${track.seen}` : ""].filter(Boolean)
    card.append(element("p", facts.join(", "), "soft"))
    track.band = null
    if (track.size) {
      track.band = element("canvas")
      track.band.setAttribute("role", "img")
      track.band.setAttribute("aria-label", `The communities of ${track.name} over time`)
      track.band.addEventListener("click", (event) => go(Math.round(event.offsetX / track.band.clientWidth * (steps - 1))))
      card.append(track.band, element("p", "Its community at each step; tall where it does much.", "soft"))
    }
    const why = track.why
    if (why) {
      card.append(rows("Who makes its vector", why.links.map(([name, share]) => [name, percent(share)]), true))
      if (why.rhythms && why.rhythms.length) card.append(rows("Rhythms of its movement", why.rhythms.map(([name, share]) => [name, percent(share)])))
      if (why.move && why.move.links.length) {
        const line = element("p", "Its largest move: "), jump = element("button", `${why.move.from} to ${why.move.to}`, "link")
        jump.type = "button"
        jump.addEventListener("click", () => go(why.move.step - time.first))
        line.append(jump)
        card.append(line, rows("Who made that move", why.move.links.map(([name, share]) => [name, percent(share)]), true))
      }
    }
    track.answers = element("div")
    card.append(track.answers)
    return card
  }))
}

// A server that knows all nodes, where the page is live.

const ask = async (what, values) => {
  const response = await fetch(`api/${what}?${new URLSearchParams(values)}`, {credentials: "same-origin"})
  const found = await response.json()
  if (!response.ok) throw new Error(found.error)
  return found
}
let later = 0
const askLater = () => {
  if (!scene.live) return
  clearTimeout(later)
  later = setTimeout(askServer, 200)
}
const askServer = async () => {
  const turn = ++state.answers, track = state.chosen[state.chosen.length - 1]
  if (!track || state.playing) return
  const at = time && state.view === "time" ? {at: time.first + step()} : {}
  const parts = []
  const when = at.at == null ? "over all time" : `at ${time.labels[step()]}`
  const one = async (made) => { try { parts.push(await made()) } catch (error) { parts.push(element("p", error.message, "soft")) } }
  await one(async () => rows(`Nearest ${when}`, (await ask("neighbors", {node: track.id ?? track.name, ...at})).neighbors.map((row) => [row.name, row.similarity.toFixed(2)]), true))
  await one(async () => {
    const found = await ask("explain", {node: track.id ?? track.name, ...at}), made = element("div")
    made.append(rows(`Which links made its vector ${when}`, found.links.map((row) => [row.name, percent(row.share)]), true))
    if (found.rhythms.length) made.append(rows("Which rhythms", found.rhythms.map((row) => [row.period, percent(row.share)])))
    return made
  })
  if (state.chosen.length > 1) await one(async () => {
    const other = state.chosen[state.chosen.length - 2]
    const found = await ask("compare", {one: track.id ?? track.name, two: other.id ?? other.name, ...at})
    return rows(`Compared with ${other.name}`, [[`cosine ${when}`, found.cosine == null ? "–" : found.cosine.toFixed(2)], ...(found.score == null ? [] : [["score of a link", found.score.toPrecision(3)]])])
  })
  if (turn === state.answers && track.answers) { track.answers.replaceChildren(...parts); state.answered = track.name }
}
const fetchTrack = async (name) => {
  const found = await ask("node", {node: name})
  if (named.all.has(found.name)) return choose(named.all.get(found.name))
  const track = {name: found.name, id: name, degree: found.degree, seen: found.seen, last: found.last, fetched: true, xy: new Int16Array(0), group: new Uint8Array(1)}
  if (found.path) Object.assign(track, cut(found.path, 1, steps)[0])
  choose(track)
}

// Search.

const match = (text) => {
  const small = text.toLowerCase(), first = [], rest = []
  for (const track of tracks.all) {
    const at = track.name.toLowerCase().indexOf(small)
    if (at === 0) first.push(track.name)
    else if (at > 0) rest.push(track.name)
    if (first.length >= 8) break
  }
  return [...first, ...rest].slice(0, 8)
}
const find = async (text) => {
  const wanted = text.trim()
  if (!wanted) return
  closeHits()
  const track = named.all.get(wanted)
  if (track) return choose(track)
  if (!scene.live) return say(`${wanted} is not among the ${scene.ids.length.toLocaleString("en")} nodes on this page.`)
  try { await fetchTrack(wanted) } catch (error) { say(error.message) }
}
const closeHits = () => { $("hits").hidden = true; $("search").setAttribute("aria-expanded", "false") }
let marked = -1
const showHits = (names) => {
  marked = -1
  $("hits").replaceChildren(...names.map((name) => {
    const item = element("li", name)
    item.setAttribute("role", "option")
    item.addEventListener("pointerdown", (event) => { event.preventDefault(); $("search").value = name; find(name) })
    return item
  }))
  $("hits").hidden = !names.length
  $("search").setAttribute("aria-expanded", String(names.length > 0))
}
$("search").addEventListener("input", async () => {
  const text = $("search").value.trim()
  if (!text) return closeHits()
  showHits(match(text))
  if (!scene.live) return
  try {
    const found = await ask("find", {text})
    if ($("search").value.trim() === text) showHits([...new Set([...match(text), ...found.names])].slice(0, 8))
  } catch (error) { say(error.message) }
})
$("search").addEventListener("keydown", (event) => {
  const items = [...$("hits").children]
  if (event.key === "Enter") { find(marked >= 0 && items[marked] ? items[marked].textContent : $("search").value); event.preventDefault() }
  if (event.key === "Escape") { closeHits(); $("search").blur() }
  if (event.key === "ArrowDown" || event.key === "ArrowUp") {
    marked = Math.min(Math.max(marked + (event.key === "ArrowDown" ? 1 : -1), -1), items.length - 1)
    items.forEach((item, i) => item.setAttribute("aria-selected", String(i === marked)))
    event.preventDefault()
  }
  event.stopPropagation()
})
$("search").addEventListener("blur", closeHits)

// Mouse, fingers, keys.

const nearest = (x, y, reach) => {
  let best = null, least = reach * reach
  for (const track of shown()) {
    const [a, b] = toScreen(place(track, state.at)), far = (a - x) ** 2 + (b - y) ** 2
    if (far < least) { least = far; best = track }
  }
  return best
}
const tell = (track, x, y) => {
  const tip = $("tip")
  tip.hidden = !track
  if (!track) return
  tip.textContent = [track.name, `community ${group(track, state.at) + 1}`,
    track.degree == null ? "" : `degree ${track.degree.toLocaleString("en")}`, track.seen ? `last seen ${track.seen}` : ""].filter(Boolean).join("\n")
  tip.style.left = `${Math.min(x + 14, map.clientWidth - 200)}px`
  tip.style.top = `${y + 14}px`
}
let drag = null
map.addEventListener("pointerdown", (event) => {
  drag = {x: event.offsetX, y: event.offsetY, dx: state.dx, dy: state.dy, moved: false}
})
map.addEventListener("pointermove", (event) => {
  if (drag && (event.buttons & 1) && event.pointerType !== "touch") {
    const [x, y] = [event.offsetX - drag.x, event.offsetY - drag.y]
    if (Math.hypot(x, y) > 4) drag.moved = true
    if (drag.moved) { state.dx = drag.dx + x; state.dy = drag.dy + y; redraw() }
    return
  }
  tell(nearest(event.offsetX, event.offsetY, 12), event.offsetX, event.offsetY)
})
map.addEventListener("pointerleave", () => tell(null))
map.addEventListener("click", (event) => {
  if (drag && drag.moved) return
  const track = nearest(event.offsetX, event.offsetY, 18)
  if (track) toggle(track)
})
const zoom = (factor, x = map.clientWidth / 2, y = map.clientHeight / 2) => {
  const before = state.zoom, [cx, cy] = [x - map.clientWidth / 2, y - map.clientHeight / 2]
  state.zoom = Math.min(Math.max(state.zoom * factor, 0.5), 40)
  const grown = state.zoom / before
  state.dx = cx + (state.dx - cx) * grown; state.dy = cy + (state.dy - cy) * grown
  redraw()
}
map.addEventListener("wheel", (event) => {
  if (!event.ctrlKey && document.activeElement !== map) return  // else a page could not be scrolled past its map
  event.preventDefault()
  zoom(Math.exp(-event.deltaY / 400), event.offsetX, event.offsetY)
}, {passive: false})
const stripTo = (event) => go(Math.round((event.offsetX - 2) / Math.max(strip.clientWidth - 4, 1) * (steps - 1)))
strip.addEventListener("pointerdown", (event) => {
  const close = time.moments.find((t) => Math.abs(across(t, strip.clientWidth) - event.offsetX) < 8 && event.offsetY < SHARES[0])
  if (close == null) stripTo(event)
  else go(close)
})
strip.addEventListener("pointermove", (event) => { if (event.buttons & 1) stripTo(event) })
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return
  const typing = event.target.matches("input:not([type=range]), select, textarea")
  if (typing) return
  const far = event.shiftKey ? 10 : 1
  const keys = {
    " ": () => play(!state.playing), ArrowLeft: () => go(step() - far), ArrowRight: () => go(step() + far),
    Home: () => go(0), End: () => go(steps - 1), "/": () => $("search").focus(),
    Escape: () => { state.chosen = []; say(""); drawPicked(); redraw() },
    "+": () => zoom(1.3), "-": () => zoom(1 / 1.3), 0: () => { state.zoom = 1; state.dx = state.dy = 0; redraw() },
  }
  if (event.key === " " && event.target.matches("button")) return  // a button that has the focus is pressed
  if (!Object.hasOwn(keys, event.key) || (!time && [" ", "ArrowLeft", "ArrowRight", "Home", "End"].includes(event.key))) return
  event.preventDefault()
  keys[event.key]()
})
$("play").addEventListener("click", () => play(!state.playing))
$("back").addEventListener("click", () => go(step() - 1))
$("next").addEventListener("click", () => go(step() + 1))
$("slider").addEventListener("input", () => go(Number($("slider").value)))
$("view").addEventListener("change", () => setView($("view").value))
$("colour").addEventListener("change", () => { state.colour = $("colour").value; state.lit = null; drawKey(); redraw() })
$("speed").addEventListener("change", () => { state.speed = Number($("speed").value) })

const drawReading = () => {
  if (!time) return
  const words = [[null, "top: share of each community"], [css.soft, time.counted ? "bars: links in the whole graph" : "bars: mean length of vectors"],
    [css.mark, "line: how far nodes move"]]
  $("reading").replaceChildren(...words.map(([colour, text]) => {
    const item = element("span", text)
    if (colour) item.prepend(swatch(colour))
    return item
  }))
}

// Begin.

readColours()
theme.changed.push(() => { readColours(); drawKey(); drawReading(); redraw() })
new ResizeObserver(redraw).observe(map)
if (time) {
  $("slider").max = steps - 1
  drawReading()
  if (time.moments.length) {
    $("moments").append(element("span", "▼ The graph as a whole changed:", "soft"), ...time.moments.slice(0, 12).map((t) => {
      const button = element("button", time.labels[t])
      button.type = "button"
      button.addEventListener("click", () => go(t))
      return button
    }))
  }
} else {
  for (const id of ["controls", "strip", "reading", "pace"]) $(id).hidden = true
  $("view").parentElement.hidden = true
}
const first = tracks[state.view].reduce((best, track) => best == null || track.degree > best.degree ? track : best, null)
if (first) choose(first)
drawKey(); tellStep(); redraw()
if (time && !still) play(true)
window.toffee = {state, scene, tracks, go, play, tell: () => { tellStep(); redraw() }, place: (name) => {
  const track = state.chosen.find((one) => one.name === name && one.size) ?? named[state.view].get(name)
  map.scrollIntoView({block: "center"})
  const {left, top} = map.getBoundingClientRect(), [x, y] = toScreen(place(track, state.at))
  return [left + x, top + y]
}}
})()
