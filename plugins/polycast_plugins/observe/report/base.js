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

const data = JSON.parse(document.getElementById("data").textContent);
const NAMES = ["before", "after"];
