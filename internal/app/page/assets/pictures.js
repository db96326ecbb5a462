// The pictures of a page: the grid of workers, the rates between nodes, and merged stacks. A pointer or the arrow keys
// choose a cell, and the line below the picture tells about it.

const tones = ['good', 'waits', 'bad', 'plain'];

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

// Grid draws every worker as a square, the workers of a node one below the other.
class Grid {
  lines = [];
  nodes = [];

  // read returns the nodes that have changed.
  read(text) {
    const lines = text.split('\n');
    const changed = [];
    for (let i = 0; i < lines.length; i++) {
      if (lines[i] === this.lines[i]) continue;
      const [tone, workers, first, state, name] = lines[i].split('\t');
      this.nodes[i] = {tone: tones[tone], workers: Number(workers), first: Number(first), state, name};
      changed.push(i);
    }
    this.nodes.length = lines.length;
    this.lines = lines;
    return changed;
  }

  // place returns whether everything has to be drawn, because it has another place.
  place(canvas) {
    const width = canvas.clientWidth, n = this.nodes.length;
    const tall = this.nodes.reduce((most, c) => Math.max(most, c.workers), 1);
    const size = Math.max(3, Math.min(18, Math.floor(Math.sqrt(width * 260 / (n * (tall + 1))))));
    const across = Math.max(1, Math.floor(width / size));
    const rows = Math.ceil(n / across) * (tall + 1);
    const same = this.width === width && this.size === size && this.tall === tall && this.rows === rows;
    Object.assign(this, {width, size, tall, across, rows, columns: Math.min(across, n), height: rows * size});
    return !same;
  }

  paint(g, fill, i) {
    const {size, across, tall} = this;
    const c = this.nodes[i];
    const gap = size > 5 ? 1 : 0;
    const x = (i % across) * size, y = Math.floor(i / across) * (tall + 1) * size;
    g.clearRect(x, y, size, tall * size);
    g.fillStyle = fill[c.tone];
    if (!gap) g.fillRect(x, y, size, c.workers * size);
    else for (let k = 0; k < c.workers; k++) g.fillRect(x, y + k * size, size - gap, size - gap);
  }

  tell(column, row) {
    const c = this.nodes[Math.floor(row / (this.tall + 1)) * this.across + column];
    const local = row % (this.tall + 1);
    if (!c || local >= c.workers) return '';
    return `${c.first >= 0 ? `rank ${c.first + local}, ` : ''}local rank ${local} on ${c.name}: ${c.state}`;
  }
}

// Matrix draws the rates between nodes: senders are rows, receivers columns. Where a node is less than a pixel, the
// worst of its cells is seen.
class Matrix {
  read(text) {
    Object.assign(this, JSON.parse(text));
    this.rows = this.columns = this.names.length;
    this.at = new Map(this.cells.map((c) => [c[0] * this.rows + c[1], c]));
    return this.cells.keys();
  }

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
    const c = this.at.get(row * this.rows + column);
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
  const [kind, text] = dataOf(canvas);
  const picture = pictures.get(canvas) ??
    Object.assign(new kinds[kind](), {column: 0, row: 0, left: new Set(), turn: 0});
  pictures.set(canvas, picture);
  if (picture.text !== text) for (const i of picture.read(text)) picture.left.add(i);
  picture.text = text;
  const all = picture.place(canvas) || again;
  if (all) {
    sized(canvas, picture.width, picture.height);
    picture.left = new Set(picture.lines?.keys() ?? picture.cells.keys());
  }
  const g = canvas.getContext('2d'), fill = colours(), turn = ++picture.turn;
  let drawn = 0;
  for (const i of picture.left) {
    if (i < (picture.lines ?? picture.cells).length) picture.paint(g, fill, i);
    picture.left.delete(i);
    if (++drawn % chunk) continue;
    await pause();
    if (picture.turn !== turn || !canvas.isConnected) return;
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
  canvas.setAttribute('aria-label', next.getAttribute('aria-label'));
  [...section.children].forEach((old, i) => {
    if (!old.matches('canvas, .told')) old.replaceWith(fresh.children[i].cloneNode(true));
  });
  return true;
}

// draw draws all pictures whose data or size has changed.
export async function draw(main, again) {
  stacks(main);
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

// choose tells about a cell.
function choose(canvas, column, row) {
  const picture = pictures.get(canvas);
  if (!picture) return;
  picture.column = Math.min(picture.columns - 1, Math.max(0, column));
  picture.row = Math.min(picture.rows - 1, Math.max(0, row));
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
  if (picture) choose(canvas, Math.floor(event.offsetX / picture.size), Math.floor(event.offsetY / picture.size));
  const item = event.target.closest?.('#flame li');
  if (item) frame(item);
}

const arrows = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1]};

// press is for the keyboard.
export function press(event) {
  const arrow = arrows[event.key];
  if (!arrow) return;
  const picture = pictures.get(event.target);
  if (picture) {
    event.preventDefault();
    let [column, row] = [picture.column + arrow[0], picture.row + arrow[1]];
    if (!choose(event.target, column, row)) choose(event.target, column, row + arrow[1]); // over the room between nodes
  } else if (event.target.id === 'flame') {
    event.preventDefault();
    walk(event.target, event.key);
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
