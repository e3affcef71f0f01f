"use strict";

// Colours: those of the reader's system until the button is used.
const root = document.documentElement;
const theme = document.createElement("button");
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : prefersDark.matches);
const nameTheme = () => { theme.textContent = isDark() ? "Light colours" : "Dark colours"; };
theme.type = "button";
theme.className = "theme";
theme.addEventListener("click", () => {
  root.dataset.theme = isDark() ? "light" : "dark";
  nameTheme();
});
prefersDark.addEventListener("change", nameTheme);
nameTheme();
document.querySelector("header").append(theme);

// Tables: a heading sorts up, then down, then as it was. Missing values stay at the end.
const collator = new Intl.Collator(undefined, { numeric: true });

function sortKey(cell, numeric) {
  if (numeric) return "value" in cell.dataset ? Number(cell.dataset.value) : null;
  return cell.matches(".none") || cell.querySelector(".none") ? null : cell.textContent;
}

function sortRows(table, original, head, column) {
  const before = head.getAttribute("aria-sort");
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  let rows = original;
  if (before !== "descending") {
    const down = before === "ascending";
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const numeric = head.classList.contains("n");
    const keys = new Map(original.map((row) => [row, sortKey(row.cells[column], numeric)]));
    rows = [...original].sort((a, b) => {
      const [x, y] = [keys.get(a), keys.get(b)];
      if (x === null || y === null) return (x === null) - (y === null);
      const order = numeric ? (x > y) - (x < y) : collator.compare(x, y);
      return down ? -order : order;
    });
  }
  table.tBodies[0].append(...rows);
}

for (const table of document.querySelectorAll("table")) {
  const original = [...table.tBodies[0].rows];
  if (original.length < 2) continue;
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    button.addEventListener("click", () => sortRows(table, original, head, column));
    head.append(button);
  });
}

// Figures: a click shows one as large as the window, and on a phone larger than that.
const dialog = document.createElement("dialog");
const bar = document.createElement("div");
const named = document.createElement("p");
const close = document.createElement("button");
const sheet = document.createElement("div");
const large = document.createElement("img");
dialog.className = "enlarged";
named.id = "enlarged-title";
dialog.setAttribute("aria-labelledby", named.id);
close.type = "button";
close.textContent = "Close";
close.addEventListener("click", () => dialog.close());
sheet.className = "paper";
sheet.addEventListener("click", () => dialog.close());
sheet.append(large);
bar.append(named, close);
dialog.append(bar, sheet);
document.body.append(dialog);

function enlarge(image, title) {
  const { naturalWidth, naturalHeight } = image;
  named.textContent = title;
  large.src = image.src;
  large.alt = image.alt;
  const fitting = Math.min(innerWidth - 64, ((innerHeight - 130) * naturalWidth) / naturalHeight);
  const enough = Math.min(naturalWidth, 1.4 * image.clientWidth);
  large.width = Math.round(fitting < enough ? Math.min(naturalWidth, 2 * enough) : fitting);
  dialog.showModal();
}

for (const image of document.querySelectorAll("figure .paper img")) {
  const title = image.closest("figure").querySelector(".title").textContent;
  const button = document.createElement("button");
  button.type = "button";
  button.className = "enlarge";
  button.setAttribute("aria-label", `Enlarge: ${title}. ${image.alt}`);
  image.replaceWith(button);
  button.append(image);
  button.addEventListener("click", () => enlarge(image, title));
}
