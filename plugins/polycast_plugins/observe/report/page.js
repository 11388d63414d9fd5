// The elements of modules and stacks are made from the data on demand; see data.py.
const make = (tag, name, ...children) => {
  const made = document.createElement(tag);
  if (name) made.className = name;
  made.append(...children.filter((each) => each !== null));
  return made;
};
const count = (number) => number.toLocaleString("en-US");
const word = (number) => {
  const text = data.words[number];
  return text === "0" ? make("span", "zero", text) : text;
};
const none = () => make("span", "none", "none");

// The values of the runs; one if they are equal.
const versus = (of, show) => {
  const last = of.length - 1;
  if (of.every((each) => JSON.stringify(each) === JSON.stringify(of[0]))) return [show(of[last])];
  return of.map((each, i) => make("span", NAMES[i], make("span", "sr", `${NAMES[i]}: `), show(each)));
};
const part = (of, at) => of.map((each) => (each === -1 ? -1 : each[at]));
const pairs = (flat) => Array.from({ length: flat.length / 2 }, (_, i) => [flat[2 * i], flat[2 * i + 1]]);
const cell = (number) => (number === -1 ? none() : word(number));
const names = (flat) => (flat === -1 || !flat.length ? none() : pairs(flat).map(([dtype]) => data.words[dtype]).join(", "));
const bars = (flat) => {
  if (flat === -1 || !flat.length) return none();
  const bar = make("span", "bar");
  bar.setAttribute("aria-hidden", "true");
  const words = make("span", "words");
  pairs(flat).forEach(([dtype, number], i) => {
    if (number > 0) {
      const piece = make("i", data.patterns[dtype]);
      piece.style.flexGrow = number;
      bar.append(piece);
    }
    words.append(`${i ? ", " : ""}${data.words[dtype]}\u00a0`, make("b", "", count(number)));
  });
  const both = document.createDocumentFragment();
  both.append(bar, words);
  return both;
};
const meter = (pair) => {
  if (pair === -1) return none();
  const [number, share] = pair;
  const bar = make("span", "meter");
  bar.setAttribute("aria-hidden", "true");
  if (share) bar.append(make("i"));
  if (share) bar.firstChild.style.width = `${share}%`;
  const both = document.createDocumentFragment();
  both.append(bar, make("span", "words", word(number)));
  return both;
};

// The lines of stacks are made when they open.
document.addEventListener(
  "toggle",
  ({ target }) => {
    if (target.open && target.dataset.stack !== undefined) {
      const lines = data.stacks[target.dataset.stack].map((line) => make("li", "", make("code", "", data.lines[line])));
      target.lastElementChild.replaceWith(make("ol", "", ...lines));
      delete target.dataset.stack;
    }
  },
  true,
);
