// The script of the page. It replaces the part that changes by what the server has written, tells times in the
// visitor's zone, counts down, draws the grid, and gives the orders that are pressed.
const main = document.querySelector('main');
const link = document.getElementById('link');

const two = (n) => String(n).padStart(2, '0');

// age writes a duration in its two largest units.
function age(ms) {
  const s = Math.max(0, Math.round(ms / 1000));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${s % 60} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor(s % 3600 / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor(s % 86400 / 3600)} h`;
}

// skew is by how much this clock is ahead of the server's.
let skew = 0;

function tellTimes() {
  for (const t of main.querySelectorAll('time')) {
    const at = new Date(t.dateTime);
    t.textContent = `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ` +
      `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
    t.title = t.dateTime;
  }
}

function countDown() {
  for (const due of main.querySelectorAll('.due')) {
    const left = new Date(due.querySelector('time').dateTime) - (Date.now() - skew);
    let span = due.querySelector('b');
    if (!span) {
      due.prepend(span = document.createElement('b'), ' ');
    }
    span.textContent = left > 0 ? `in ${age(left)},` : 'now,';
  }
}

// drawGrid draws every worker as a square, the workers of a node one below the other.
const colours = ['good', 'waits', 'bad', 'plain'];
let cells = [];
let layout = null;

function drawGrid() {
  const canvas = main.querySelector('#grid canvas');
  if (!canvas) return;
  cells = JSON.parse(canvas.dataset.cells);
  const width = canvas.clientWidth;
  const tall = Math.max(1, ...cells.map((c) => c.w));
  const size = Math.max(3, Math.min(18, Math.floor(Math.sqrt(width * 260 / Math.max(1, cells.length * (tall + 1))))));
  const across = Math.max(1, Math.floor(width / size));
  const rows = Math.ceil(cells.length / across);
  layout = {size, across, tall};
  const scale = window.devicePixelRatio || 1;
  const height = rows * (tall + 1) * size;
  canvas.style.height = `${height}px`;
  canvas.width = width * scale;
  canvas.height = height * scale;
  const style = getComputedStyle(document.documentElement);
  const probe = document.createElement('i');
  document.body.append(probe);
  const fill = {};
  for (const c of colours) {
    probe.style.color = c === 'plain' ? style.color : `var(--${c})`;
    fill[c] = getComputedStyle(probe).color;
  }
  probe.remove();
  const g = canvas.getContext('2d');
  g.scale(scale, scale);
  const gap = size > 5 ? 1 : 0;
  cells.forEach((c, i) => {
    const x = (i % across) * size;
    const y = Math.floor(i / across) * (tall + 1) * size;
    g.fillStyle = fill[c.t];
    for (let k = 0; k < c.w; k++) g.fillRect(x, y + k * size, size - gap, size - gap);
  });
}

function pointAt(event) {
  const canvas = event.target.closest?.('#grid canvas');
  if (!canvas || !layout) return;
  const {size, across, tall} = layout;
  const c = cells[Math.floor(event.offsetY / size / (tall + 1)) * across + Math.floor(event.offsetX / size)];
  const local = Math.floor(event.offsetY / size) % (tall + 1);
  if (!c || local >= c.w) return;
  const rank = c.r >= 0 ? `rank ${c.r + local}, ` : '';
  main.querySelector('#cell').textContent = `${rank}local rank ${local} on ${c.n}: ${c.s}`;
}

function ready() {
  const as = main.querySelector('footer time');
  if (as) skew = Date.now() - new Date(as.dateTime);
  tellTimes();
  countDown();
  drawGrid();
  for (const b of main.querySelectorAll('button[data-kind]')) b.disabled = false;
}

// refresh asks for the part that changes. Only one request is under way; news meanwhile cause another one.
let busy = false, again = false;

async function refresh() {
  if (busy) {
    again = true;
    return;
  }
  busy = true;
  try {
    const answer = await fetch(`${location.pathname}?part`, {cache: 'no-store'});
    if (answer.status === 401) {
      location.reload();
      return;
    }
    if (answer.ok) {
      const held = document.activeElement?.closest('button[data-kind]')?.dataset.kind;
      main.innerHTML = await answer.text();
      ready();
      if (held) main.querySelector(`button[data-kind="${CSS.escape(held)}"]`)?.focus();
      link.textContent = '';
    } else {
      link.textContent = `The daemon answers ${answer.status}.`;
    }
  } catch {
    link.textContent = 'The daemon does not answer; this is what it said last.';
  } finally {
    busy = false;
  }
  if (again) {
    again = false;
    refresh();
  }
}

// order asks once more before it gives an order.
async function order(button) {
  const kind = button.dataset.kind;
  let node = '';
  if ('node' in button.dataset) {
    node = prompt(`${button.textContent}: which one? ${button.nextElementSibling.textContent}`) ?? '';
    if (!node) return;
  } else if (!confirm(`${button.textContent}? ${button.nextElementSibling.textContent}`)) {
    return;
  }
  const answer = await fetch(main.dataset.orders, {
    method: 'POST', headers: {'Content-Type': 'application/json', 'X-Dlrover-Page': '1'}, body: JSON.stringify({kind, node}),
  });
  link.textContent = answer.ok ? '' : await answer.text();
  refresh();
}

if (main.dataset.poll) {
  ready();
  setInterval(countDown, 1000);
  setInterval(() => document.hidden || refresh(), Number(main.dataset.poll));
  addEventListener('visibilitychange', () => document.hidden || refresh());
  addEventListener('resize', drawGrid);
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', drawGrid);
  main.addEventListener('mousemove', pointAt);
  main.addEventListener('click', (event) => {
    pointAt(event);
    const button = event.target.closest('button[data-kind]');
    if (button) order(button);
  });
}
if (main.dataset.live) new EventSource(main.dataset.live).addEventListener('change', refresh);
