// The pictures of a page: the grid of workers, the rates between nodes, and merged stacks. A pointer or the arrow keys
// choose a cell, and the line below the picture tells about it.

// tones are by number; the larger is the worse.
const tones = ['good', 'plain', 'waits', 'bad'];

// colours are those of the style, which depend on the scheme.
function colours() {
  const probe = document.createElement('i');
  document.body.append(probe);
  const fill = {};
  for (const c of [...tones, 'lossy', 'line']) {
    probe.style.color = c === 'plain' ? 'var(--text)' : `var(--${c})`;
    fill[c] = getComputedStyle(probe).color;
  }
  probe.remove();
  return fill;
}

// sized gives a canvas its size, in pixels of the style.
function sized(canvas, width, height) {
  const scale = window.devicePixelRatio || 1;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const g = canvas.getContext('2d');
  g.scale(scale, scale);
}

// pause lets the browser draw a frame, and hear its visitor.
export const pause = () => new Promise((done) => setTimeout(done));

// chunk is how many cells are drawn before a pause.
const chunk = 1000;

// view is how visitors want to see grids; it outlives what the server writes anew.
export const view = {by: 'state', folded: new Set()};

// lag has the colour of a lateness: seconds, with a + while the rank has not come.
function lag(late, fill, dark) {
  if (!late) return fill.line;
  if (late.endsWith('+')) return fill.bad;
  const share = Math.min(1, Math.max(0, Math.log2(parseFloat(late) / 0.6) / 6));
  return share ? `hsl(${Math.round(70 - 40 * share)} 75% ${dark ? 55 : 42}%)` : fill.good;
}

// of is the value of one worker: values are one for all of a node, or one for each.
const of = (values, i) => values.length > 1 ? values[i] : values[0];

// Grid draws every worker as a square, the workers of a node one below the other. Nodes of one switch are a block with
// its name above; a folded one is a column with the worst of its workers.
class Grid {
  lines = [];
  fresh = []; // nodes that are being read
  nodes = [];
  blocks = [];

  // read adds what has changed to left: nodes, and behind these the names of blocks. It yields after each chunk.
  *read(text, switches) {
    const lines = text.split('\n');
    if (lines.length > chunk) yield;
    let news = 0;
    for (let i = 0; i < lines.length; i++) {
      if (lines[i] === this.lines[i]) continue;
      const [tone, workers, first, block, late, state, name] = lines[i].split('\t');
      this.fresh[i] = {tone, workers: Number(workers), first: Number(first), block: Number(block),
        late: late.split(','), state, name};
      this.lines[i] = lines[i];
      this.left.add(i);
      if (++news % chunk === 0) yield;
    }
    if (lines.length > chunk) yield;
    this.lines.length = this.fresh.length = lines.length;
    this.nodes = [...this.fresh];
    this.blocks = (switches ? JSON.parse(switches) : ['']).map((name) => ({name, nodes: []}));
    for (const n of this.nodes) n.k = this.blocks[n.block].nodes.push(n) - 1;
    for (let b = 0; b < this.blocks.length; b++) this.left.add(lines.length + b);
  }

  get count() { return this.nodes.length + this.blocks.length; }

  // place returns whether everything has to be drawn, because it has another place.
  place(canvas) {
    const width = canvas.clientWidth, several = this.blocks.length > 1;
    const tall = this.nodes.reduce((most, c) => Math.max(most, c.workers), 1);
    const size = Math.max(3, Math.min(18, Math.floor(Math.sqrt(width * 260 / (this.nodes.length * (tall + 1))))));
    const across = Math.max(1, Math.floor(width / size));
    const title = several ? Math.ceil(14 / size) : 0;
    const least = several ? Math.min(across, Math.ceil(64 / size)) : 0;
    let x = 0, y = 0, shelf = 0;
    for (const b of this.blocks) {
      b.folded = several && view.folded.has(b.name);
      b.columns = Math.min(across, b.folded ? 1 : b.nodes.length);
      b.width = Math.max(b.columns, least);
      b.rows = title + (b.folded ? tall + 1 : Math.ceil(b.nodes.length / b.columns) * (tall + 1));
      if (x > 0 && x + b.width > across) {
        x = 0;
        y += shelf;
        shelf = 0;
      }
      Object.assign(b, {x, y});
      shelf = Math.max(shelf, b.rows);
      x += b.width + 1;
    }
    const rows = y + shelf;
    const places = this.blocks.map((b) => [b.x, b.y, b.width, b.columns, b.rows].join()).join(' ');
    const same = this.places === places && this.width === width && this.size === size && this.by === view.by;
    const dark = matchMedia('(prefers-color-scheme: dark)').matches;
    Object.assign(this, {width, size, tall, across, title, rows, places, dark, by: view.by, columns: across,
      height: rows * size});
    return !same;
  }

  colour(fill, c, i) {
    return view.by === 'late' ? lag(of(c.late, i), fill, this.dark) : fill[tones[of(c.tone, i)]];
  }

  paint(g, fill, i) {
    if (i >= this.nodes.length) {
      this.caption(g, fill, this.blocks[i - this.nodes.length]);
      return;
    }
    const {tall, title} = this;
    const c = this.nodes[i], b = this.blocks[c.block];
    if (b.folded) return;
    this.strip(g, fill, c, b.x + c.k % b.columns, b.y + title + Math.floor(c.k / b.columns) * (tall + 1));
  }

  // strip draws the workers of a node.
  strip(g, fill, c, column, row) {
    const size = this.size, x = column * size, y = row * size;
    const gap = size > 5 ? 1 : 0;
    g.clearRect(x, y, size, this.tall * size);
    const same = view.by === 'late' ? c.late.length < 2 : c.tone.length < 2;
    if (!gap && same) {
      g.fillStyle = this.colour(fill, c, 0);
      g.fillRect(x, y, size, c.workers * size);
      return;
    }
    for (let w = 0; w < c.workers; w++) {
      g.fillStyle = this.colour(fill, c, w);
      g.fillRect(x, y + w * size, size - gap, size - gap);
    }
  }

  // caption draws the name of a block, and what there is of a folded one.
  caption(g, fill, b) {
    const {size, title} = this;
    if (!title) return;
    if (b.folded) this.strip(g, fill, this.worst(b), b.x, b.y + title);
    const x = b.x * size, y = b.y * size, width = b.width * size, height = title * size;
    g.clearRect(x, y, width, height);
    g.save();
    g.beginPath();
    g.rect(x, y, width, height);
    g.clip();
    g.font = '11px system-ui, sans-serif';
    g.textBaseline = 'middle';
    g.fillStyle = this.troubled(b) ? fill.bad : fill.plain;
    g.fillText(`${b.folded ? '\u25b8' : '\u25be'} ${b.name}`, x, y + height / 2);
    g.restore();
  }

  // worst is the worst worker of each local rank.
  worst(b) {
    const c = {tone: '', late: [], workers: this.tall};
    const weight = (late) => late.endsWith('+') ? Infinity : late ? parseFloat(late) : -1;
    for (let w = 0; w < this.tall; w++) {
      const there = b.nodes.filter((n) => w < n.workers);
      c.tone += there.reduce((worst, n) => Math.max(worst, of(n.tone, w)), 0);
      c.late.push(there.reduce((worst, n) => weight(of(n.late, w)) > weight(worst) ? of(n.late, w) : worst, ''));
    }
    return c;
  }

  // troubled is how many workers of a block are red.
  troubled(b) {
    const red = view.by === 'late' ? (n, w) => of(n.late, w).endsWith('+') : (n, w) => of(n.tone, w) === '3';
    let sum = 0;
    for (const n of b.nodes) for (let w = 0; w < n.workers; w++) sum += red(n, w);
    return sum;
  }

  // at is the block at a place, and how far below its first row.
  at(column, row) {
    const b = this.blocks.find((b) => column >= b.x && column < b.x + b.width && row >= b.y && row < b.y + b.rows);
    return [b, b ? row - b.y - this.title : 0];
  }

  // about tells about a block.
  about(b) {
    const workers = b.nodes.reduce((sum, n) => sum + n.workers, 0);
    return `${b.name}: ${b.nodes.length} nodes, ${workers} workers, ${this.troubled(b)} of them red; ` +
      `Enter ${b.folded ? 'unfolds' : 'folds'} it`;
  }

  tell(column, row) {
    const [b, below] = this.at(column, row);
    if (!b || column - b.x >= b.columns && below >= 0) return '';
    if (below < 0 || b.folded) return below < this.tall ? this.about(b) : '';
    const c = b.nodes[Math.floor(below / (this.tall + 1)) * b.columns + column - b.x];
    const local = below % (this.tall + 1);
    if (!c || local >= c.workers) return '';
    const late = of(c.late, local);
    const came = !late ? '' : late.endsWith('+') ? `; has not come, ${late.slice(0, -1)} s after the first` :
      `; came ${late} s after the first`;
    return `${c.first >= 0 ? `rank ${c.first + local}, ` : ''}local rank ${local} on ${c.name}` +
      `${this.title ? ` (${b.name})` : ''}: ${c.state}${came}`;
  }
}

// Matrix draws the rates between nodes: senders are rows, receivers columns. Where a node is less than a pixel, the
// worst of its cells is seen.
class Matrix {
  *read(text) {
    Object.assign(this, JSON.parse(text));
    this.rows = this.columns = this.names.length;
    this.known = new Map(this.cells.map((c) => [c[0] * this.rows + c[1], c]));
    for (const i of this.cells.keys()) this.left.add(i);
  }

  get count() { return this.cells.length; }

  place(canvas) {
    this.width = canvas.clientWidth;
    this.size = Math.min(38, Math.max(1, Math.min(this.width, 900)) / this.rows);
    this.height = Math.ceil(this.size * this.rows);
    this.dark = matchMedia('(prefers-color-scheme: dark)').matches;
    return true;
  }

  // paint draws the last cell first: the worst are seen above all others.
  paint(g, fill, i) {
    const size = this.size;
    const side = Math.max(1, size > 5 ? size - 1 : size);
    if (i === 0) {
      g.fillStyle = fill.line;
      g.fillRect(0, 0, size * this.rows, size * this.rows);
    }
    const [from, to, rate, problem] = this.cells[this.cells.length - 1 - i];
    const share = this.median > 0 ? Math.min(1, Math.max(0, 2 * rate / this.median - 1)) : 1;
    g.fillStyle = problem && !rate ? fill.plain : `hsl(${Math.round(130 * share)} 65% ${this.dark ? 55 : 42}%)`;
    g.fillRect(to * size, from * size, side, side);
    if (problem !== 'segments lost') return;
    g.strokeStyle = fill.lossy;
    g.lineWidth = Math.max(1, Math.min(3, size / 4));
    g.strokeRect(to * size + 1, from * size + 1, Math.max(1, side - 2), Math.max(1, side - 2));
  }

  tell(column, row) {
    const from = this.names[row], to = this.names[column];
    if (from === undefined || to === undefined) return '';
    const c = this.known.get(row * this.rows + column);
    if (row === column) return from;
    if (!c) return `${from} to ${to}: not tested`;
    const rate = c[2] ? `${Number(c[2].toPrecision(3))} Mbit/s` : '';
    return `${from} to ${to}: ${[rate, c[3]].filter(Boolean).join(', ')}`;
  }
}

const kinds = {grid: Grid, matrix: Matrix};

// pictures are those that are drawn, by the element: their data, and the chosen cell.
const pictures = new WeakMap();

function dataOf(canvas) {
  const kind = Object.keys(kinds).find((k) => k in canvas.dataset);
  return [kind, canvas.dataset[kind]];
}

// show reads the data of a canvas if they are others, and draws what has changed, or everything again. A later call
// ends an earlier one, whose cells it draws as well.
async function show(canvas, again) {
  const [kind, text] = dataOf(canvas), switches = canvas.dataset.switches;
  const picture = pictures.get(canvas) ??
    Object.assign(new kinds[kind](), {column: 0, row: 0, left: new Set(), turn: 0});
  pictures.set(canvas, picture);
  const turn = ++picture.turn;
  const goesOn = async () => {
    await pause();
    return picture.turn === turn && canvas.isConnected;
  };
  if (picture.text !== text || picture.switches !== switches) {
    for (const _ of picture.read(text, switches)) if (!await goesOn()) return;
    Object.assign(picture, {text, switches});
    if (!await goesOn()) return;
  }
  if (picture.place(canvas) || again) {
    sized(canvas, picture.width, picture.height);
    picture.left = new Set(Array(picture.count).keys());
  }
  const g = canvas.getContext('2d'), fill = colours();
  let drawn = 0;
  for (const i of picture.left) {
    if (i < picture.count) picture.paint(g, fill, i);
    picture.left.delete(i);
    if (++drawn % chunk === 0 && !await goesOn()) return;
  }
}

const line = (element) => element.parentElement.querySelector('.told');

// adopt has a section with a picture go on with a new text, and reports whether it could.
export function adopt(section, fresh) {
  const canvas = section.querySelector('canvas'), next = fresh.querySelector('canvas');
  if (!canvas || !next || section.children.length !== fresh.children.length) return false;
  const [kind, text] = dataOf(next);
  if (dataOf(canvas)[0] !== kind) return false;
  canvas.dataset[kind] = text;
  if (next.dataset.switches !== undefined) canvas.dataset.switches = next.dataset.switches;
  canvas.setAttribute('aria-label', next.getAttribute('aria-label'));
  [...section.children].forEach((old, i) => {
    if (!old.matches('canvas, .told') && !old.isEqualNode(fresh.children[i])) {
      old.replaceWith(fresh.children[i].cloneNode(true));
    }
  });
  return true;
}

// draw draws all pictures whose data or size has changed.
export async function draw(main, again) {
  stacks(main);
  controls(main);
  for (const canvas of main.querySelectorAll('canvas')) {
    await pause();
    await show(canvas, again);
  }
}

// stacks makes the indented list of merged stacks a flame graph: a function is as wide as its stacks.
function stacks(main) {
  for (const item of main.querySelectorAll('#flame:not(.drawn) li')) {
    item.style.flexGrow = item.dataset.stacks;
    const calls = item.querySelector(':scope > ul');
    if (!calls) continue;
    const below = [...calls.children].reduce((sum, c) => sum + Number(c.dataset.stacks), 0);
    calls.style.setProperty('--ends', Math.max(0, item.dataset.stacks - below));
  }
  main.querySelector('#flame')?.classList.add('drawn');
}

// controls shows what the visitor has chosen.
function controls(main) {
  for (const radio of main.querySelectorAll('#by input')) {
    radio.checked = radio.value === view.by;
    radio.disabled = false;
  }
  for (const button of main.querySelectorAll('[data-fold]')) {
    button.setAttribute('aria-expanded', !view.folded.has(button.textContent));
    button.disabled = false;
  }
}

// colour has grids coloured by something else.
export function colour(main, by) {
  view.by = by;
  draw(main);
}

// fold folds the block of a name, or unfolds it.
export async function fold(main, name) {
  if (!view.folded.delete(name)) view.folded.add(name);
  await draw(main);
  const canvas = main.querySelector('#grid canvas');
  const block = canvas && pictures.get(canvas)?.blocks.find((b) => b.name === name);
  if (block) choose(canvas, block.x, block.y);
}

// choose tells about a cell.
function choose(canvas, column, row) {
  const picture = pictures.get(canvas);
  if (!picture) return;
  picture.column = Math.min(picture.columns - 1, Math.max(0, column));
  picture.row = Math.min(picture.rows - 1, Math.max(0, row));
  const [block, below] = picture.at?.(picture.column, picture.row) ?? [];
  if (block && below < 0) picture.column = block.x; // so that the way down leads to its nodes
  const text = picture.tell(picture.column, picture.row);
  if (text) line(canvas).textContent = text;
  return text;
}

// frame tells about a function of merged stacks.
function frame(item) {
  const flame = item.closest('#flame');
  flame.querySelector('.chosen')?.classList.remove('chosen');
  const label = item.querySelector(':scope > span');
  label.classList.add('chosen');
  line(flame).textContent = label.textContent;
  label.scrollIntoView({block: 'nearest', inline: 'nearest'});
}

// point is for a pointer that moves over a picture, or presses one.
export function point(event) {
  const canvas = event.target.closest?.('canvas');
  const picture = canvas && pictures.get(canvas);
  if (picture) {
    const [column, row] = [event.offsetX, event.offsetY].map((at) => Math.floor(at / picture.size));
    choose(canvas, column, row);
    if (event.type === 'click' && picture.title) {
      const [block, below] = picture.at(column, row);
      if (block && (below < 0 || block.folded)) fold(canvas.closest('main'), block.name);
    }
  }
  const item = event.target.closest?.('#flame li');
  if (item) frame(item);
}

const arrows = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1]};

// press is for the keyboard.
export function press(event) {
  const arrow = arrows[event.key];
  const picture = pictures.get(event.target);
  if (arrow && picture) {
    event.preventDefault();
    step(event.target, picture, arrow);
  } else if (arrow && event.target.id === 'flame') {
    event.preventDefault();
    walk(event.target, event.key);
  } else if (picture?.title && (event.key === 'Enter' || event.key === ' ')) {
    event.preventDefault();
    const [block] = picture.at(picture.column, picture.row);
    if (block) fold(event.target.closest('main'), block.name);
  }
}

// step chooses the next cell in a direction that tells something else.
function step(canvas, picture, [dx, dy]) {
  const before = line(canvas).textContent;
  let {column, row} = picture;
  for (;;) {
    column += dx;
    row += dy;
    if (column < 0 || row < 0 || column >= picture.columns || row >= picture.rows) return;
    const text = picture.tell(column, row);
    if (text && text !== before) {
      choose(canvas, column, row);
      return;
    }
  }
}

// walk goes from the chosen function to its caller, to the first that it has called, or to those beside it.
function walk(flame, key) {
  const at = flame.querySelector('.chosen')?.parentElement;
  const next = !at ? flame.querySelector('li') : {
    ArrowUp: at.parentElement.closest('li'), ArrowDown: at.querySelector('li'),
    ArrowLeft: at.previousElementSibling, ArrowRight: at.nextElementSibling,
  }[key];
  if (next) frame(next);
}
