// The script of the page. It replaces the part that changes by what the server has written, tells times in the
// visitor's zone, counts down, has the pictures drawn, and gives the orders that are pressed.

import {adopt, colour, draw, fold, pause, point, press} from './pictures.js';
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
  for (const t of main.querySelectorAll('time:not([title])')) {
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

function ready() {
  const as = main.querySelector('footer time');
  if (as) skew = Date.now() - new Date(as.dateTime);
  tellTimes();
  countDown();
  draw(main);
  for (const b of main.querySelectorAll('button[data-kind]')) b.disabled = false;
}

// shown are the sections as the server has written them; '': one with a picture.
const written = (sections) => sections.map((e) => e.querySelector('canvas') ? '' : e.outerHTML);
let shown = written([...main.children]);

// handle is a selector of a control that may be written anew, or ''.
function handle(e) {
  for (const name of ['kind', 'fold']) {
    if (e?.dataset[name]) return `button[data-${name}="${CSS.escape(e.dataset[name])}"]`;
  }
  return e?.name === 'by' ? `input[name=by][value=${e.value}]` : '';
}

// replace shows a new part: of sections that are there already only those that have changed.
async function replace(html) {
  const part = document.createElement('template');
  part.innerHTML = html;
  await pause();
  const old = [...main.children], fresh = [...part.content.children];
  const chosen = handle(document.activeElement);
  const texts = written(fresh);
  if (old.length === fresh.length && fresh.every((e, i) => e.tagName === old[i].tagName && e.id === old[i].id)) {
    fresh.forEach((e, i) => {
      if ((!texts[i] || texts[i] !== shown[i]) && !adopt(old[i], e)) old[i].replaceWith(e);
    });
  } else {
    main.replaceChildren(part.content);
  }
  shown = texts;
  ready();
  if (chosen && !document.activeElement?.matches(chosen)) main.querySelector(chosen)?.focus();
}

// said is about the last order, and stays; the page says for a while that it gets no news.
let said = '';

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
      await replace(await answer.text());
      link.textContent = said;
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

function say(text) { link.textContent = said = text; }

// save keeps an answer that is a file. It is kept as a whole, or not at all.
async function save(answer) {
  const url = URL.createObjectURL(await answer.blob());
  const name = /filename="([^"]+)"/.exec(answer.headers.get('Content-Disposition'))?.[1] ?? 'file';
  Object.assign(document.createElement('a'), {href: url, download: name}).click();
  setTimeout(() => URL.revokeObjectURL(url), 60000);
  say(`Saved: ${name}`);
}

// order asks once more before it gives an order.
async function order(button) {
  const {kind, asks} = button.dataset, label = button.textContent;
  const wish = {kind}, cost = button.nextElementSibling.textContent;
  if (asks) {
    wish[asks] = prompt(`${label}: which one? ${cost}`) ?? '';
    if (!wish[asks]) return;
  } else if (!confirm(`${label}? ${cost}`)) {
    return;
  }
  say(`${label}: under way`);
  try {
    const answer = await fetch(main.dataset.orders, {
      method: 'POST', headers: {'Content-Type': 'application/json', 'X-Dlrover-Page': '1'}, body: JSON.stringify(wish),
    });
    if (answer.status === 200) await save(answer);
    else say(answer.ok ? '' : await answer.text());
  } catch {
    say(`${label}: the answer has broken off; the daemon's log may say why.`);
  }
  refresh();
}

if (main.dataset.poll) {
  ready();
  setInterval(countDown, 1000);
  setInterval(() => document.hidden || refresh(), Number(main.dataset.poll));
  addEventListener('visibilitychange', () => document.hidden || refresh());
  addEventListener('resize', () => draw(main, true));
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => draw(main, true));
  main.addEventListener('mousemove', point);
  main.addEventListener('keydown', press);
  main.addEventListener('click', (event) => {
    point(event);
    const button = event.target.closest('button[data-kind]');
    if (button) order(button);
    const block = event.target.closest('button[data-fold]');
    if (block) fold(main, block.textContent);
  });
  main.addEventListener('change', (event) => event.target.name === 'by' && colour(main, event.target.value));
}
if (main.dataset.live) new EventSource(main.dataset.live).addEventListener('change', refresh);
