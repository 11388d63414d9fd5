"use strict";
for (const tools of document.querySelectorAll(".scripted")) tools.hidden = false;

// Narrow pages show tables as cards, and what is no table to the eye is to stay one to a screen reader.
const roles = { TABLE: "table", THEAD: "rowgroup", TBODY: "rowgroup", TR: "row", TD: "cell" };
for (const part of document.querySelectorAll(".cards, .cards :is(thead, tbody, tr, td, th)")) {
  part.setAttribute("role", roles[part.tagName] || (part.scope === "row" ? "rowheader" : "columnheader"));
}

// The module tree: native details, with the keys of a tree besides.
const tree = document.getElementById("tree");
if (tree) {
  const modules = [...tree.querySelectorAll("details.module")];
  for (const button of document.querySelectorAll("[data-open]")) {
    button.addEventListener("click", () => modules.forEach((each) => (each.open = button.dataset.open === "all")));
  }
  tree.addEventListener("keydown", (event) => {
    const line = event.target.closest("summary.line");
    if (!line || event.target !== line || event.altKey || event.ctrlKey || event.metaKey) return;
    const lines = [...tree.querySelectorAll("summary.line")].filter((each) => each.offsetParent);
    const at = lines.indexOf(line);
    const around = line.parentElement.parentElement.closest("details.module");
    const steps = {
      ArrowDown: () => lines[at + 1]?.focus(),
      ArrowUp: () => lines[at - 1]?.focus(),
      Home: () => lines[0].focus(),
      End: () => lines.at(-1).focus(),
      ArrowRight: () => (line.parentElement.open ? lines[at + 1]?.focus() : (line.parentElement.open = true)),
      ArrowLeft: () => (line.parentElement.open ? (line.parentElement.open = false) : around?.firstElementChild.focus()),
    };
    if (steps[event.key]) {
      event.preventDefault();
      steps[event.key]();
    }
  });
  const reveal = () => {
    const target = location.hash.startsWith("#m") && document.getElementById(location.hash.slice(1));
    for (let each = target; each && each !== tree; each = each.parentElement) each.open = true;
    if (target && target.classList.contains("module")) {
      target.scrollIntoView();
      target.querySelector("summary")?.focus({ preventScroll: true });
    }
  };
  addEventListener("hashchange", reveal);
  reveal();
  const changed = document.getElementById("module-changed");
  changed?.addEventListener("change", () => {
    for (const each of tree.querySelectorAll(".module")) {
      each.hidden = changed.checked && !("changed" in each.dataset) && !each.querySelector("[data-changed]");
    }
  });
}

// The op table: sorted by its headers, filtered by what is asked for.
const table = document.getElementById("ops-table");
if (table) {
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const status = document.getElementById("ops-status");
  const heads = [...table.tHead.rows[0].cells];
  const text = document.getElementById("filter-text");
  const pass = document.getElementById("filter-pass");
  const dtype = document.getElementById("filter-dtype");
  const changed = document.getElementById("filter-changed");
  const inner = document.getElementById("filter-inner");
  let order = "the most calls first";

  const say = () => {
    const shown = rows.filter((row) => !row.hidden).length;
    status.textContent = `${shown} of ${rows.length} ops shown, ${order}.`;
  };
  const filter = () => {
    const wanted = text.value.trim().toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of rows) {
      const said = row.textContent.toLowerCase();
      row.hidden = !(
        wanted.every((word) => said.includes(word)) &&
        (!pass.value || row.dataset.pass === pass.value) &&
        (!dtype.value || row.dataset.dtypes.split(" ").includes(dtype.value)) &&
        (!changed?.checked || "changed" in row.dataset) &&
        (inner?.checked || !("inner" in row.dataset))
      );
    }
    say();
  };
  const value = (row, column, numbers) => {
    const cell = row.cells[column];
    return numbers ? Number(cell.dataset.value) : cell.textContent.trim();
  };
  const sort = (column) => {
    const head = heads[column];
    const numbers = head.dataset.sort === "number";
    const first = numbers ? "descending" : "ascending";
    const other = numbers ? "ascending" : "descending";
    const direction = head.getAttribute("aria-sort") === first ? other : first;
    for (const each of heads) each.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", direction);
    const sign = direction === "ascending" ? 1 : -1;
    rows.sort((a, b) => {
      const [left, right] = [value(a, column, numbers), value(b, column, numbers)];
      return sign * (numbers ? left - right : left.localeCompare(right));
    });
    body.append(...rows);
    order = `sorted by ${head.textContent}, ${direction}`;
    say();
  };
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    button.addEventListener("click", () => sort(column));
    head.replaceChildren(button);
  });
  document.getElementById("filter").addEventListener("submit", (event) => event.preventDefault());
  text.addEventListener("input", filter);
  for (const each of [pass, dtype, changed, inner]) each?.addEventListener("change", filter);
  filter();
}
