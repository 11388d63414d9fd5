// The op table, sorted by its headers and filtered by the fields above.
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
  let order = status.textContent.split(", ")[1].replace(".", "");

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
