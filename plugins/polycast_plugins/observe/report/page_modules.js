// The module tree: details elements with the keys of a tree. The modules in a module are made when it opens, in chunks,
// when these come near the viewport.
const tree = document.getElementById("tree");
if (tree) {
  const CHUNK = 50;
  const MAX_FOUND = 20;
  const MAX_PRINTED = 500;
  const modules = [];
  const roots = [];
  const around = [];
  data.modules.forEach(([depth, name, kind, changed, open, ops, of], number) => {
    const outer = depth ? around[depth - 1] : null;
    const own = data.words[name];
    const full = outer && outer.full ? `${outer.full}.${own}` : own;
    const module = { number, depth, full, kind: data.words[kind], changed, open, ops, of, outer, inner: [], below: 0 };
    module.label = own.slice(own.lastIndexOf(".") + 1) || module.kind || "model";
    around.length = depth;
    around.push(module);
    for (let each = outer; each; each = each.outer) each.below += 1;
    (outer ? outer.inner : roots).push(module);
    modules.push(module);
  });
  let opensAll = false;
  const changed = document.getElementById("module-changed");

  const table = (module) => {
    const caption = make("caption", "", "Its own ops, in ", make("span", "full", module.full || "the model"));
    const heads = ["op", "pass", "calls", "policy, by", "computes in", "casts", "bytes"];
    const head = make("tr", "", ...heads.map((text) => make("th", /calls|casts|bytes/.test(text) ? "n" : "", text)));
    for (const each of head.children) each.scope = "col";
    const body = make("tbody");
    for (const number of module.ops) {
      const [op, phase, policy, rule, of] = data.ops[number];
      const first = make("th", "", data.words[op]);
      first.scope = "row";
      const row = make("tr", "", first);
      const add = (what, isNumber, ...shown) => {
        const made = make("td", isNumber ? "n" : "", ...shown);
        made.dataset.of = what;
        row.append(made);
      };
      add("pass", false, data.words[phase]);
      add("calls", true, ...versus(part(of, 0), cell));
      add("policy, by", false, `${data.words[policy]} `, make("span", "by", data.words[rule]));
      add("computes in", false, ...versus(part(of, 1), names));
      add("casts", true, ...versus(part(of, 2), cell));
      add("bytes", true, ...versus(part(of, 3), cell));
      body.append(row);
    }
    return withRoles(make("table", "cards", caption, make("thead", "", head), body));
  };

  const fold = (module) => {
    const text = `${module.ops.length} own op${module.ops.length > 1 ? "s" : ""}`;
    const folded = make("details", "trace", make("summary", "", text));
    folded.fill = () => folded.append(table(module));
    return folded;
  };

  const line = (module, tag) => {
    const { label, kind, of } = module;
    const cells = [make("span", "cell", make("span", "sr", "computes in "), ...versus(part(of, 0), bars))];
    if (data.timed) {
      const time = make("span", "words", ...versus(part(of, 1), cell));
      cells.push(make("span", "cell", make("span", "cap", "time "), time));
    }
    const shares = (at) => of.map((each) => (each === -1 ? -1 : each.slice(at, at + 2)));
    cells.push(make("span", "cell", make("span", "cap", "casts "), ...versus(shares(2), meter)));
    cells.push(make("span", "cell", make("span", "cap", "bytes cast "), ...versus(shares(4), meter)));
    const name = make("span", "name", make("span", "label", label), " ", make("span", "kind", label === kind ? "" : kind));
    if (part(of, 6).some((rule) => data.words[rule])) name.append(make("span", "by", "rule: ", ...versus(part(of, 6), cell)));
    const made = make(tag, "line", name, ...cells);
    made.style.setProperty("--depth", Math.min(module.depth, 12));
    return made;
  };

  const element = (module) => {
    const opens = module.inner.length || module.ops.length;
    const made = make(opens ? "details" : "div", "module", line(module, opens ? "summary" : "div"));
    made.id = `m${module.number}`;
    made.hidden = Boolean(changed?.checked) && !module.changed;
    module.element = made;
    if (opens) {
      made.fill = () => {
        if (module.ops.length) {
          const own = make("div", "own", module.inner.length ? fold(module) : table(module));
          own.style.setProperty("--depth", Math.min(module.depth, 12));
          made.append(own);
        }
        addChunks(made, module.inner);
      };
      if (opensAll && module.inner.length) fill(made, false);
      else if (module.open) fill(made, true);
      made.open = opensAll || Boolean(module.open);
    }
    return made;
  };

  const build = (chunk) => {
    if (!chunk.modules) return;
    const inside = chunk.modules;
    chunk.modules = null;
    seen.unobserve(chunk);
    chunk.append(...inside.map(element));
    chunk.style.minHeight = "";
  };
  const seen = new IntersectionObserver(
    (entries) => entries.filter((entry) => entry.isIntersecting).forEach((entry) => build(entry.target)),
    { rootMargin: "600px" },
  );
  const addChunks = (parent, inside) => {
    for (let i = 0; i < inside.length; i += CHUNK) {
      const chunk = make("div", "chunk");
      chunk.modules = inside.slice(i, i + CHUNK);
      const rows = chunk.modules.reduce((sum, each) => sum + 1 + (opensAll ? each.below : 0), 0);
      chunk.dataset.count = count(rows);
      chunk.style.minHeight = `${3 * rows}rem`;
      for (const each of chunk.modules) each.chunk = chunk;
      parent.append(chunk);
      seen.observe(chunk);
    }
  };
  // Make the contents of an element that opens. If the user opened it, make its first modules at once.
  const fill = (opened, isAskedFor) => {
    const make = opened.fill;
    if (!make) return;
    opened.fill = null;
    make();
    const first = opened.querySelector(":scope > .chunk");
    if (first && isAskedFor) build(first);
  };
  const show = (module) => {
    if (module.outer) {
      show(module.outer);
      fill(module.outer.element, false);
      module.outer.element.open = true;
    }
    build(module.chunk);
  };
  tree.addEventListener("toggle", (event) => event.target.open && fill(event.target, !opensAll), true);
  addChunks(tree, roots);
  build(tree.querySelector(".chunk"));

  for (const button of document.querySelectorAll("[data-open]")) {
    button.addEventListener("click", () => {
      opensAll = button.dataset.open === "all";
      for (const each of tree.querySelectorAll("details.module")) {
        if (opensAll) fill(each, false);
        each.open = opensAll;
      }
    });
  }

  // The visible lines, and the chunks among them that are not made yet.
  const shown = () => [...tree.querySelectorAll("summary.line, .chunk:empty")].filter((each) => each.offsetParent);
  const focus = (from, step) => {
    for (;;) {
      const lines = shown();
      const next = lines.at(from === null ? (step > 0 ? 0 : -1) : lines.indexOf(from) + step);
      if (from !== null && lines.indexOf(from) + step < 0) return;
      if (!next?.modules) return next?.focus();
      build(next);
    }
  };
  tree.addEventListener("keydown", (event) => {
    const line = event.target.closest("summary.line");
    if (!line || event.target !== line || event.altKey || event.ctrlKey || event.metaKey) return;
    const module = line.parentElement;
    const outer = module.parentElement.closest("details.module");
    const steps = {
      ArrowDown: () => focus(line, 1),
      ArrowUp: () => focus(line, -1),
      Home: () => focus(null, 1),
      End: () => focus(null, -1),
      ArrowRight: () => (module.open ? focus(line, 1) : (fill(module, true), (module.open = true))),
      ArrowLeft: () => (module.open ? (module.open = false) : outer?.firstElementChild.focus()),
    };
    if (steps[event.key]) {
      event.preventDefault();
      steps[event.key]();
    }
  });
  const reveal = () => {
    const module = /^#m\d+$/.test(location.hash) && modules[location.hash.slice(2)];
    if (!module) return;
    tree.querySelector(".target")?.classList.remove("target");
    show(module);
    module.element.classList.add("target");
    module.element.open = true;
    module.element.scrollIntoView();
    module.element.querySelector("summary")?.focus({ preventScroll: true });
  };
  addEventListener("hashchange", reveal);
  document.addEventListener("click", (event) => {
    const link = event.target.closest('a[href^="#m"]');
    if (link?.hash === location.hash) reveal(); // the hash does not change, so there is no event
  });
  reveal();
  changed?.addEventListener("change", () => {
    for (const each of modules) {
      if (each.element) each.element.hidden = changed.checked && !each.changed;
    }
  });

  const find = document.getElementById("module-find");
  const found = document.getElementById("module-found");
  find.addEventListener("input", () => {
    const wanted = find.value.trim().toLowerCase().split(/\s+/).filter(Boolean);
    const has = (each) => wanted.every((word) => `${each.full} ${each.kind}`.toLowerCase().includes(word));
    const matches = wanted.length ? modules.filter(has) : [];
    const more = matches.length > MAX_FOUND ? `, the first ${MAX_FOUND} of which are these` : "";
    found.hidden = !wanted.length;
    found.querySelector("p").textContent = `${count(matches.length)} of ${count(modules.length)} modules found${more}.`;
    const links = matches.slice(0, MAX_FOUND).map((each) => {
      const link = make("a", "", each.full || each.label);
      link.href = `#m${each.number}`;
      return make("li", "", link, ` ${each.kind}`);
    });
    found.querySelector("ul").replaceChildren(...links);
  });
  // Print open modules, up to some hundreds; the others are counted.
  addEventListener("beforeprint", () => {
    let left = MAX_PRINTED;
    for (let next; left > 0 && (next = tree.querySelector(":is(#tree, details[open]) > .chunk:empty")); ) {
      left -= next.modules.length;
      build(next);
    }
  });
}
