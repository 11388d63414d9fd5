"use strict";
for (const tools of document.querySelectorAll(".scripted")) tools.hidden = false;

// Narrow pages show tables as cards. Roles keep them tables for screen readers.
const roles = { TABLE: "table", THEAD: "rowgroup", TBODY: "rowgroup", TR: "row", TD: "cell" };
const withRoles = (table) => {
  for (const each of [table, ...table.querySelectorAll("thead, tbody, tr, td, th")]) {
    each.setAttribute("role", roles[each.tagName] || (each.scope === "row" ? "rowheader" : "columnheader"));
  }
  return table;
};
document.querySelectorAll(".cards").forEach(withRoles);

// Beside each piece of code in a remedy, a button that copies it or, where pages may not, selects it.
for (const code of document.querySelectorAll(".remedy code")) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "copy";
  const what = document.createElement("span");
  what.className = "sr";
  what.textContent = ` ${code.textContent}`;
  button.append("copy", what);
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.firstChild.data = "copied";
    } catch {
      getSelection().selectAllChildren(code);
      button.firstChild.data = "selected";
    }
  });
  code.after(" ", button);
}

const data = JSON.parse(document.getElementById("data").textContent);
const NAMES = ["before", "after"];
