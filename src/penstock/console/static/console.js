// Follows the pipeline: asks for the page again while it can be seen, and replaces its content if that has changed.
// Without a script, every page can be read and every form be sent.
"use strict";

const EVERY_MS = 2000;
const UNITS = [["second", 1, 60], ["minute", 60, 60], ["hour", 3600, 24], ["day", 86400, Infinity]];
const relative = new Intl.RelativeTimeFormat(undefined, {numeric: "always", style: "short"});

function showAges() {
  for (const time of document.querySelectorAll("time[datetime]")) {
    const seconds = (Date.now() - Date.parse(time.dateTime)) / 1000;
    const [unit, size] = UNITS.find(([, size, most]) => Math.abs(seconds) / size < most);
    time.title ||= time.textContent;
    time.textContent = relative.format(-Math.round(seconds / size), unit);
  }
}

function show(text) {
  const live = document.getElementById("live");
  if (live && live.textContent !== text) live.textContent = text;
}

function replace(main, html) {
  const next = new DOMParser().parseFromString(html, "text/html").getElementById("main");
  if (!next) return;  // not a page of ours, but a proxy's
  const held = document.activeElement;
  const href = main.contains(held) ? held.getAttribute("href") : null;
  patch(main, next);
  prepare();
  // A row that has moved takes the focus along.
  if (href !== null && held.getAttribute("href") !== href) main.querySelector(`a[href="${CSS.escape(href)}"]`)?.focus();
}

// Changes what differs and leaves all else: an element keeps its focus, how far it was scrolled, and what was typed into it.
function patch(now, next) {
  if (now.nodeName !== next.nodeName || now.nodeType !== next.nodeType) return now.replaceWith(next);
  if (now.nodeType !== Node.ELEMENT_NODE) {
    if (now.data !== next.data) now.data = next.data;
    return;
  }
  for (const {name} of [...now.attributes]) if (!next.hasAttribute(name)) now.removeAttribute(name);
  for (const {name, value} of next.attributes) if (now.getAttribute(name) !== value) now.setAttribute(name, value);
  const [old, wanted] = [[...now.childNodes], [...next.childNodes]];
  wanted.forEach((child, i) => old[i] ? patch(old[i], child) : now.append(child));
  old.slice(wanted.length).forEach((child) => child.remove());
}

// On a narrow screen a row is a card, in which each cell is named by the head of its column.
function nameCells() {
  for (const table of document.querySelectorAll("table")) {
    const heads = [...table.querySelectorAll("thead th")].map((head) => head.textContent);
    for (const row of table.tBodies[0]?.rows ?? []) [...row.cells].forEach((cell, i) => { cell.dataset.head = heads[i] ?? ""; });
  }
}

function prepare() {
  showAges();
  nameCells();
  for (const command of document.querySelectorAll("code.command")) Object.assign(command, {tabIndex: 0, role: "button", title: "Copy"});
}

let shown = "";  // the tag of what is shown
let isPaused = false;  // by a key

async function follow() {
  const main = document.querySelector("main[data-live]");
  if (!main) return show("");
  const held = document.activeElement;  // pages may begin with the focus in a field
  const isTyping = held.matches("main input") && (held.value !== held.defaultValue || held.checked !== held.defaultChecked);
  if (document.visibilityState === "visible" && !isPaused && getSelection().isCollapsed && !isTyping) {
    try {
      const answer = await fetch(location.href, {cache: "no-store", headers: {"If-None-Match": shown}});
      if (answer.redirected || answer.status === 401) return location.reload();
      const html = await answer.text();
      if (!isPaused && (answer.ok || answer.status >= 500)) {
        replace(main, html);
        shown = answer.headers.get("ETag") || "";
      }
      if (!isPaused) show(answer.ok || answer.status === 304 ? "live" : "waiting");
    } catch {
      show("no answer");
    }
  } else {
    show(isPaused ? "paused by p" : "paused");
  }
  setTimeout(follow, EVERY_MS);
}

document.addEventListener("click", (event) => {
  const command = event.target.closest("code.command");
  if (!command) return;
  const range = document.createRange();
  range.selectNodeContents(command);
  getSelection().removeAllRanges();
  getSelection().addRange(range);
  navigator.clipboard?.writeText(command.textContent);
});

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, dialog")) return;
  const rows = [...document.querySelectorAll("main tbody th a")];
  const row = rows.indexOf(document.activeElement);
  const step = {ArrowDown: 1, ArrowUp: -1}[event.key];
  if (event.key === "/") document.querySelector(".find input")?.focus();
  else if (event.key === "?") document.getElementById("keys")?.showModal();
  else if (event.key === "p" && document.querySelector("main[data-live]")) show((isPaused = !isPaused) ? "paused by p" : "live");
  else if (step && row >= 0) rows[row + step]?.focus();
  else if (event.key === "Enter" && event.target.matches("code.command")) event.target.click();
  else return;
  event.preventDefault();
});

// The scheme of the system, or the one that was chosen here.
const THEMES = ["system", "light", "dark"];
const theme = document.getElementById("theme");

function setTheme(name) {
  if (name === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  if (!theme) return;
  theme.textContent = name;
  theme.setAttribute("aria-label", `Colours: ${name}; change them`);
}

theme?.addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(theme.textContent) + 1) % THEMES.length];
  localStorage.setItem("theme", next);
  setTheme(next);
});
if (theme) theme.hidden = false;
setTheme(THEMES.find((name) => name === localStorage.getItem("theme")) ?? "system");
document.documentElement.classList.add("scripted");
prepare();
setInterval(showAges, 1000);
setTimeout(follow, EVERY_MS);
