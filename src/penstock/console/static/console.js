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
  main.replaceWith(next);
  if (href !== null) next.querySelector(`a[href="${CSS.escape(href)}"]`)?.focus();
  showAges();
}

let shown = "";  // the tag of what is shown

async function follow() {
  const main = document.querySelector("main[data-live]");
  if (!main) return;
  const isTyping = document.activeElement.matches("main input");
  if (document.visibilityState === "visible" && getSelection().isCollapsed && !isTyping) {
    try {
      const answer = await fetch(location.href, {cache: "no-store", headers: {"If-None-Match": shown}});
      if (answer.redirected || answer.status === 401) return location.reload();
      if (answer.ok || answer.status === 503) {
        replace(main, await answer.text());
        shown = answer.headers.get("ETag") || "";
      }
      show(answer.ok || answer.status === 304 ? "live" : "waiting");
    } catch {
      show("no answer");
    }
  } else {
    show("paused");
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

showAges();
setInterval(showAges, 1000);
setTimeout(follow, EVERY_MS);
