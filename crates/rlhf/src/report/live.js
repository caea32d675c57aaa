
// Newer states of the run, without loading the page again.
const live = document.getElementById("live");
const name = document.title;
let revision = live.dataset.revision;
const PAUSE = 2000, HIDDEN_PAUSE = 20000;

// Parts of the page that the reader or the script above has set.
const OWN = new Set(["open", "hidden"]);

// Changes `old` into `fresh` and keeps what is the same in both, with its open details, listeners and focus.
function merge(old, fresh) {
  if (old.nodeName !== fresh.nodeName) return old.replaceWith(fresh);
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.nodeValue !== fresh.nodeValue) old.nodeValue = fresh.nodeValue;
    return;
  }
  if (old.matches(".controls")) return;
  for (const { name } of [...old.attributes]) if (!OWN.has(name) && !fresh.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of fresh.attributes) {
    if (!OWN.has(name) && old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  mergeChildren(old, fresh);
}

// Pairs children that have an id by it, and others by their place.
function mergeChildren(old, fresh) {
  const named = new Map([...old.children].filter(child => child.id).map(child => [child.id, child]));
  let next = old.firstChild;
  for (const child of [...fresh.childNodes]) {
    const match = child.id ? named.get(child.id) : next && !next.id && next.nodeName === child.nodeName ? next : null;
    if (!match) {
      old.insertBefore(child, next);
      continue;
    }
    if (match === next) next = next.nextSibling;
    else old.insertBefore(match, next);
    merge(match, child);
  }
  while (next) {
    const last = next;
    next = next.nextSibling;
    last.remove();
  }
}

function say(text) {
  if (live.textContent !== text) live.textContent = text;
}

let timer, runs = false;

async function update() {
  if (runs) return;
  runs = true;
  clearTimeout(timer);
  try {
    const answer = await fetch("parts?since=" + encodeURIComponent(revision), { cache: "no-store" });
    if (!answer.ok) throw new Error(answer.statusText);
    const { revision: newest, parts } = await answer.json();
    if (Object.keys(parts).length > 0) hide();
    for (const [id, text] of Object.entries(parts)) {
      // A parsed document is inert: its scripts do not run.
      const fresh = new DOMParser().parseFromString(text, "text/html").getElementById(id);
      if (fresh) merge(document.getElementById(id), fresh);
    }
    const short = document.getElementById("progress").dataset.short;
    document.title = short ? `${short} ${name}` : name;
    revision = newest;
    setUp();
    say("Live: changes appear within seconds.");
  } catch (error) {
    say("The server does not answer: this is the last state that it sent.");
  }
  runs = false;
  timer = setTimeout(update, document.hidden ? HIDDEN_PAUSE : PAUSE);
}

document.addEventListener("visibilitychange", () => {
  if (!document.hidden) update();
});
update();
