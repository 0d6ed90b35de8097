"""The parts of the HTML page that are the same for every program: its looks, its behaviour, its glossary."""

GLOSSARY: dict[str, str] = {
    "add": "Adds two arrays, number by number.",
    "add_any": "Adds up two gradients of the same value.",
    "all_gather": "Collects the parts of an array from all devices, so that each holds the whole.",
    "all_to_all": "Every device sends a different part to every other one.",
    "argmax": "The place of the largest number.",
    "axis_index": "The number of this device along mesh axes.",
    "broadcast_in_dim": "Repeats an array along new dimensions.",
    "concatenate": "Puts arrays one behind the other.",
    "cond": "Runs one of several branches, depending on a number.",
    "convert_element_type": "Changes the number format, for example float32 to bfloat16.",
    "cumsum": "Running sums.",
    "custom_jvp_call": "Calls a function that brings its own derivative.",
    "custom_vjp_call": "Calls a function that brings its own backward pass.",
    "debug_callback": "Calls back into Python, for printing.",
    "device_put": "Moves an array to another place, for example to the host's memory.",
    "div": "Divides two arrays, number by number.",
    "dot_general": "Matrix multiplication, or many of them. In [contract 1x0], dimension 1 of the left "
    "operand is summed against dimension 0 of the right one.",
    "dynamic_slice": "Cuts out a piece at a place known only when it runs.",
    "dynamic_update_slice": "Overwrites a piece at a place known only when it runs.",
    "erf": "The error function.",
    "eq": "Where two arrays are equal.",
    "exp": "e to the power of each number.",
    "gather": "Looks up rows, as in an embedding table.",
    "ge": "Where one array is at least the other.",
    "gt": "Where one array is greater than the other.",
    "integer_pow": "A whole power of each number.",
    "iota": "Counts 0, 1, 2, ...",
    "jit": "Calls a function; the indented lines are its body.",
    "log": "The natural logarithm.",
    "logistic": "The sigmoid, 1 / (1 + exp(-x)).",
    "lt": "Where one array is less than the other.",
    "max": "The larger of two arrays, number by number.",
    "min": "The smaller of two arrays, number by number.",
    "mul": "Multiplies two arrays, number by number.",
    "name": "Gives an array a name that a rematerialisation policy can speak of. Computes nothing.",
    "neg": "Changes the sign.",
    "optimization_barrier": "Keeps the compiler from moving work across this point. Computes nothing.",
    "pad": "Adds a margin.",
    "pallas_call": "A hand-written kernel.",
    "ppermute": "Each device passes its part to another one, as around a ring.",
    "pow": "A power of each number.",
    "psum": "Adds up over devices.",
    "psum_scatter": "Adds up over devices, each keeping one part of the sum.",
    "random_bits": "Random bits from a key.",
    "reduce_max": "The largest number over some dimensions.",
    "reduce_sum": "Sums over some dimensions.",
    "reduce_scatter": "Adds up over devices, each keeping one part of the sum.",
    "remat2": "What is indented is not kept for the backward pass but computed again there: less memory, "
    "more work.",
    "checkpoint": "What is indented is computed again in the backward pass: less memory, more work.",
    "reshape": "The same numbers in another shape.",
    "reshard": "Spreads an array over the devices in another way.",
    "rsqrt": "One over the square root.",
    "scan": "A loop that runs its body once for every slice of an array, handing a state on.",
    "scatter": "Writes to places given by indices.",
    "scatter-add": "Adds to places given by indices, as the gradient of an embedding does.",
    "select_n": "Picks from one of several arrays, number by number.",
    "shard_map": "Runs its body once on every device, each with its own part of the arrays.",
    "sharding_constraint": "Says how an array is spread over the devices: P('fsdp', None) splits dimension 0 "
    "over the mesh axis fsdp and leaves dimension 1 whole. Computes nothing.",
    "sin": "The sine.",
    "slice": "Cuts out a piece.",
    "sort": "Sorts.",
    "split": "Cuts an array into pieces.",
    "sqrt": "The square root.",
    "square": "The square of each number.",
    "squeeze": "Drops dimensions of size one.",
    "stop_gradient": "Passes a value on, but no gradient back.",
    "sub": "Subtracts two arrays, number by number.",
    "tanh": "The hyperbolic tangent.",
    "transpose": "Swaps dimensions.",
    "while": "Repeats its body as long as its condition holds.",
}
"""What a primitive does, for a reader who has never seen one."""

TOP = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{css}</style></head><body>
<div class="bar"><div><button id="previous" title="key p">Previous change</button>
<button id="next" title="key n">Next change</button><span id="at" class="n soft"></span>
<input id="filter" placeholder="Show only lines with ... (key /)" aria-label="filter"></div></div>
<header><h1>{title}</h1>
<p>JAX traced your program into a list of small steps, called equations: {equations} of them. Each pass below
took that list and changed it. Lines on <span class="tag plus">green</span> were added, lines on
<span class="tag minus">red</span> removed; what did not change is folded away and opens with a click. At the
right of each line is the line of your own source that it comes from.</p>
"""

CSS = """
:root { color-scheme: light dark;
  --bg: #ffffff; --panel: #f6f7f9; --ink: #1d2430; --soft: #626d7d; --line: #dfe3e9; --accent: #2457c5;
  --add: #e3f6e6; --add-ink: #14652b; --del: #fde8e6; --del-ink: #a3251b; --again: #fdf3d6; --again-ink:
  #7a5600;
  --op: #7a2fa8; --type: #0b6b78; --name: #1d2430; --new: #14652b; --hit: #ffe58a; }
@media (prefers-color-scheme: dark) { :root {
  --bg: #14171c; --panel: #1c2027; --ink: #e2e6ec; --soft: #98a2b1; --line: #2f353f; --accent: #8ab0ff;
  --add: #17331f; --add-ink: #86d99b; --del: #3c1f1f; --del-ink: #f2a39c; --again: #38301a; --again-ink:
  #e6c877;
  --op: #d0a3f2; --type: #7fd0dc; --name: #e2e6ec; --new: #86d99b; --hit: #6b5a14; } }
* { box-sizing: border-box; }
html { scroll-padding-top: 64px; }
body { margin: 0; background: var(--bg); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
header, main { max-width: 1500px; margin: 0 auto; padding: 0 24px; }
h1 { font-size: 24px; margin: 24px 0 4px; }
h2 { font-size: 18px; margin: 0; }
h3 { font-size: 15px; margin: 18px 0 6px; }
p { margin: 6px 0; max-width: 85ch; }
code, .l, .anatomy { font: 12.5px/1.6 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.soft { color: var(--soft); }
a { color: var(--accent); }
.bar { position: sticky; top: 0; z-index: 5; background: var(--bg); border-bottom: 1px solid var(--line); }
.bar > div { max-width: 1500px; margin: 0 auto; padding: 8px 24px; display: flex; gap: 10px; align-items:
  center;
  flex-wrap: wrap; }
button, input { font: inherit; font-size: 14px; color: var(--ink); background: var(--panel); border: 1px solid
  var(--line); border-radius: 6px; padding: 4px 12px; }
button { cursor: pointer; } button:hover { border-color: var(--accent); }
input { flex: 1; min-width: 160px; max-width: 420px; }
.passes { width: 100%; border-collapse: collapse; margin: 12px 0; max-width: 1000px; }
.passes td, .passes th { text-align: left; padding: 5px 14px 5px 0; border-bottom: 1px solid var(--line);
  vertical-align: top; }
.passes th { font-weight: 600; color: var(--soft); font-size: 13px; }
.passes td:first-child { white-space: nowrap; }
.n { font-variant-numeric: tabular-nums; white-space: nowrap; }
p.none { padding: 4px 18px; }
.tag { padding: 1px 6px; border-radius: 4px; } .tag.plus { background: var(--add); } .tag.minus {
  background: var(--del); }
.plus { color: var(--add-ink); } .minus { color: var(--del-ink); } .mod { color: var(--again-ink); }
section { border: 1px solid var(--line); border-radius: 10px; margin: 22px 0; }
section > .head { padding: 12px 18px; background: var(--panel); border-bottom: 1px solid var(--line);
  border-radius:
  10px 10px 0 0; }
section > .body { padding: 6px 0 10px; }
.notes { margin: 6px 0 0; padding-left: 20px; font-size: 14px; }
.l { display: grid; grid-template-columns: 26px minmax(0, 1fr) minmax(120px, 30%); border-left: 3px solid
  transparent; }
.l.wide { grid-template-columns: 26px minmax(0, 1fr); } .l.wide > .s { display: none; }
.l > .m { text-align: center; color: var(--soft); user-select: none; }
.l > .t { padding-left: calc(var(--d) * 18px + 20px); text-indent: -20px; overflow-wrap: anywhere;
  white-space: pre-wrap;
  background: repeating-linear-gradient(to right, transparent 0 17px, var(--line) 17px 18px) 0 0 /
  calc(var(--d) * 18px)
  100% no-repeat; }
.l > .s { color: var(--soft); padding: 0 14px 0 10px; overflow: hidden; text-overflow: ellipsis;
  white-space: nowrap;
  font-size: 12px; }
.l > .s b { font-weight: 600; color: var(--ink); opacity: .75; }
.l.add { background: var(--add); border-left-color: var(--add-ink); } .l.add > .m { color: var(--add-ink); }
.l.del { background: var(--del); border-left-color: var(--del-ink); } .l.del > .m { color: var(--del-ink); }
.l.again { background: var(--again); border-left-color: var(--again-ink); }
.l.here { outline: 2px solid var(--accent); outline-offset: -2px; }
.l:hover { box-shadow: inset 0 0 0 999px color-mix(in srgb, var(--ink) 4%, transparent); }
.o { color: var(--op); font-weight: 600; } .f { color: var(--op); } .y { color: var(--type); }
.v { cursor: pointer; border-radius: 3px; } .v.new { color: var(--new); font-weight: 600; } .v.hit {
  background:
  var(--hit); }
.x { color: var(--soft); } .k { color: var(--soft); font-style: italic; }
.fold > summary { font: 12.5px/1.9 ui-monospace, Menlo, Consolas, monospace; color: var(--soft); cursor:
  pointer;
  list-style: none; padding-left: calc(26px + var(--d, 0) * 18px); }
.fold > summary::before { content: '\\25b8  '; } .fold[open] > summary::before { content: '\\25be  '; }
.fold > summary:hover { color: var(--accent); background: var(--panel); }
.fold .chunk { content-visibility: auto; contain-intrinsic-size: auto 4000px; }
.chg { text-decoration: underline 2px; text-underline-offset: 3px; }
.legend { border: 1px solid var(--line); border-radius: 10px; padding: 4px 18px 10px; margin: 14px 0;
  background:
  var(--panel); }
.legend > summary { cursor: pointer; font-weight: 600; padding: 8px 0 6px; }
.anatomy { display: flex; flex-wrap: wrap; gap: 4px 14px; margin: 6px 0 10px; }
.anatomy > span { display: inline-flex; flex-direction: column; border-top: 2px solid var(--line);
  padding-top: 2px; }
.anatomy small { font: 12.5px/1.4 system-ui, sans-serif; color: var(--soft); max-width: 210px; }
.words { columns: 2 380px; column-gap: 32px; margin: 4px 0; padding: 0; list-style: none; font-size: 14px; }
.words li { break-inside: avoid; margin-bottom: 3px; }
body.filtering .l:not(.match), body.filtering .fold > summary { display: none; }
body.filtering .l.match { background: color-mix(in srgb, var(--hit) 35%, var(--bg)); }
@media (max-width: 900px) { .l { grid-template-columns: 22px minmax(0, 1fr); } .l > .s { display: none; } }
"""

JS = r"""
(() => {
const data = JSON.parse(document.getElementById('data').textContent);
const BITS = {f64: 64, f32: 32, f16: 16, bf16: 16, i64: 64, i32: 32, i16: 16, i8: 8, i4: 4, u64: 64, u32: 32,
  u16: 16, u8: 8, u4: 4, bool: 8, c64: 64};
const WORD = {f: 'float', bf: 'bfloat', i: 'int', u: 'uint', c: 'complex'};
const esc = s => s.replace(/&/g, '&amp;').replace(/</g, '&lt;').replace(/>/g, '&gt;').replace(/"/g, '&quot;');
const number = n => n.toLocaleString('en-US');

function inWords(type) {
  const m = type.match(/^([A-Za-z0-9_]+)(<[^>]*>)?\[([^\]]*)\]/);
  if (!m) return type;
  const [, kind, space, dims] = m, parts = kind.match(/^([a-z]+)(\d*)/);
  const memory = space ? ' in ' + space.slice(1, -1) + ' memory' : '';
  const base = (WORD[parts[1]] ? WORD[parts[1]] + parts[2] : kind) + memory;
  if (!dims) return 'one ' + base + ' number';
  const sizes = dims.split(',').map(d => parseInt(d)), many = sizes.reduce((a, b) => a * b, 1);
  let text = base + ' array, ' + dims.split(',').join(' x ') + ' = ' + number(many) + ' numbers';
  if (BITS[kind]) { let b = many * BITS[kind] / 8, u = 0; while (b >= 1024 && u < 4) { b /= 1024; u++; }
    text += ', ' + (u ? b.toFixed(1) : b) + ' ' + ['bytes', 'KiB', 'MiB', 'GiB', 'TiB'][u]; }
  return text;
}
const variable = v => !/^[a-z]+'*$/.test(v) ? `<span class="x">${esc(v)}</span>` :
  `<span class="v${v.endsWith("'") ? ' new' : ''}" data-v="${esc(v)}">${esc(v)}</span>`;
const typeSpan = y => `<span class="y" title="${esc(inWords(y))}">${esc(y)}</span>`;
function declared(text) {  // `x: f32[3], y: f32[]`, with words in between
  let out = '', at = 0;
  for (const m of text.matchAll(/([a-z]+'*): ([A-Za-z0-9_]+(?:<[^>]*>)?\[[^\]]*\](?:\{[^}]*\})?)/g)) {
    out += esc(text.slice(at, m.index)) + variable(m[1]) + ': ' + typeSpan(m[2]);
    at = m.index + m[0].length;
  }
  return out + esc(text.slice(at));
}
function equation(text, named) {
  const cut = text.indexOf(' = ');
  let head = cut < 0 ? '' : text.slice(0, cut), rest = cut < 0 ? text : text.slice(cut + 3), tail = '';
  const box = rest.indexOf(' [');
  if (box >= 0) { tail = rest.slice(box); rest = rest.slice(0, box); }
  const words = rest.split(' '), op = words.shift();
  const fn = named && words.length ? ' <span class="f">' + esc(words.shift()) + '</span>' : '';
  return (head ? declared(head) + ' = ' : '') +
    `<span class="o" title="${esc(data.words[op] || op)}">${esc(op)}</span>` + fn +
    (words.length ? ' ' + words.map(variable).join(' ') : '') +
    (tail ? `<span class="x">${esc(tail)}</span>` : '');
}
function looks(kind, text) {
  if (kind === 'eqn' || kind === 'call') return equation(text, kind === 'call');
  if (kind === 'text') return esc(text);
  const m = text.match(/^(input|const|output|return|branch \d+(?: \([a-z ]+\))?:|condition:|body:)(.*)$/);
  if (!m) return `<span class="k">${esc(text)}</span>`;
  const rest = kind === 'return' || kind === 'output' ? m[2].split(' ').map(w => w && variable(w)).join(' ')
    : kind === 'again' ? esc(m[2]) : declared(m[2]);
  return `<span class="k">${m[1]}</span>` + rest;
}
const KINDS = ['eqn', 'call', 'input', 'const', 'body', 'again', 'return', 'output', 'text'];
function place(src, scope) {
  const [where, fn, code] = src ? data.sources[src] : ['', '', ''];
  const inside = scope ? 'scope: ' + data.scopes[scope] : '';
  const title = [where + (fn ? ' in ' + fn : ''), code, inside].filter(Boolean);
  const label = where ? `<b>${esc(where)}</b> ${esc(code)}` : esc(scope ? data.scopes[scope] : '');
  return `<span class="s" title="${esc(title.join('\n'))}">${label}</span>`;
}
const CLASS = {'+': 'add', '-': 'del', '~': 'again'};
function row([depth, kind, text, src, scope, mark]) {
  const look = (CLASS[mark] || '') + (KINDS[kind] === 'text' ? ' wide' : '');
  return `<div class="l ${look}" style="--d:${depth}"><span class="m">${mark || ''}</span>` +
    `<span class="t">${looks(KINDS[kind], data.texts[text])}</span>${place(src, scope)}</div>`;
}
function fill(fold) {
  const rows = data.folds[fold.dataset.rows];
  if (!rows || fold.dataset.full) return;
  fold.dataset.full = 1;
  const box = fold.querySelector('.rows');
  for (let i = 0; i < rows.length; i += 200) {
    const chunk = document.createElement('div');
    chunk.className = 'chunk';
    chunk.style.containIntrinsicSize = 'auto ' + Math.min(200, rows.length - i) * 20 + 'px';
    chunk.innerHTML = rows.slice(i, i + 200).map(row).join('');
    box.append(chunk);
  }
}
document.querySelectorAll('.l[data-k]').forEach(l => {
  const t = l.querySelector('.t');
  const note = l.dataset.note ? ` <span class="k">${esc(l.dataset.note)}</span>` : '';
  t.innerHTML = looks(l.dataset.k, t.textContent) + note;
});
document.querySelectorAll('.l.del.pair + .l.add.pair').forEach(now => {  // what differs between the two
  const old = [...now.previousElementSibling.querySelectorAll('.t > span')];
  const spans = [...now.querySelectorAll('.t > span')];
  if (old.length === spans.length) spans.forEach((span, k) => {
    if (span.textContent !== old[k].textContent) [span, old[k]].forEach(s => s.classList.add('chg')); });
});
document.addEventListener('toggle', e => {
  if (e.target.classList?.contains('fold') && e.target.open) fill(e.target); }, true);

// ---- the same variable, everywhere in its section
let marked = '';
function mark(section, name) {
  document.querySelectorAll('.v.hit').forEach(v => v.classList.remove('hit'));
  if (!name) return;
  section.querySelectorAll('.v').forEach(v => v.dataset.v === name && v.classList.add('hit'));
}
document.addEventListener('mouseover', e => {
  if (!marked && e.target.classList?.contains('v')) mark(e.target.closest('section'), e.target.dataset.v); });
document.addEventListener('mouseout', e => !marked && e.target.classList?.contains('v') && mark(null, ''));
document.addEventListener('click', e => {
  if (!e.target.classList?.contains('v')) return;
  marked = marked === e.target.dataset.v ? '' : e.target.dataset.v;
  mark(e.target.closest('section'), marked);
});

// ---- from change to change
const changed = [...document.querySelectorAll('.l.add, .l.del, .l.again')]
  .filter(l => !/\b(add|del|again)\b/.test(l.previousElementSibling?.className || ''));
let at = -1;
const said = document.getElementById('at');
function tell() {
  const many = number(changed.length);
  const here = at < 0 ? `${many} places changed` : `change ${at + 1} of ${many}`;
  said.textContent = changed.length ? here : 'no changes';
}
function go(step) {
  if (!changed.length) return;
  changed[at]?.classList.remove('here');
  at = at < 0 ? (step > 0 ? 0 : changed.length - 1) : (at + step + changed.length) % changed.length;
  for (let d = changed[at].closest('details'); d; d = d.parentElement.closest('details')) d.open = true;
  changed[at].classList.add('here');
  changed[at].scrollIntoView({block: 'center'});
  tell();
}
document.getElementById('next').onclick = () => go(1);
document.getElementById('previous').onclick = () => go(-1);
tell();

// ---- the filter: only lines with this text, folded ones too
const box = document.getElementById('filter');
let timer, opened = [];
function filter() {
  const wanted = box.value.trim().toLowerCase();
  document.body.classList.toggle('filtering', !!wanted);
  if (!wanted) { opened.forEach(d => { d.open = false; }); opened = []; tell(); return; }
  document.querySelectorAll('.fold:not([open])').forEach(d => { fill(d); d.open = true; opened.push(d); });
  let n = 0;
  document.querySelectorAll('.l').forEach(l => {
    const hit = l.textContent.toLowerCase().includes(wanted);
    l.classList.toggle('match', hit); n += hit; });
  said.textContent = number(n) + ' lines';
}
box.oninput = () => { clearTimeout(timer); timer = setTimeout(filter, 150); };
document.onkeydown = e => {
  if (e.target === box) { if (e.key === 'Escape') { box.value = ''; filter(); box.blur(); } return; }
  if (e.ctrlKey || e.metaKey || e.altKey) return;
  if (e.key === 'n') go(1);
  else if (e.key === 'p') go(-1);
  else if (e.key === '/') { box.focus(); e.preventDefault(); }
};
})();
"""
