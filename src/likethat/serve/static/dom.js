// Small helpers: elements, requests, numbers.

/** An element. Attributes that start with "on" are listeners; true and false set and leave out. */
export function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** What went wrong with a request, as a sentence for a person. */
export class Problem extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

export async function request(url, options = {}) {
  let response;
  try {
    response = await fetch(url, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(0, "The server does not answer. It may have been stopped; start it again and reload this page.");
  }
  if (response.status === 401) location.reload(); // the token is asked for again
  const document = await response.json().catch(() => ({}));
  if (!response.ok) throw new Problem(response.status, document.detail || `The server answered ${response.status}.`);
  return document;
}

/** Tells people who listen instead of looking. */
export function say(text) {
  document.getElementById("status").textContent = text;
}

export const signed = (value, digits = 2) => value.toFixed(digits).replace("-", "−");
export const percent = (value) => {
  const shown = 100 * value;
  return (shown > 99.9 && shown < 100 ? "> 99.9" : shown < 0.1 && shown > 0 ? "< 0.1" : shown.toFixed(1)) + " %";
};
/** As people read it: without the number and the underscores that folders of data sets have. */
export const pretty = (name) => name.replace(/^\d+\./, "").replaceAll("_", " ");
export const title = (id, name) => (name ? `${name} (prototype ${id})` : `Prototype ${id}`);

export function debounce(milliseconds, action) {
  let timer;
  return (...values) => {
    clearTimeout(timer);
    timer = setTimeout(() => action(...values), milliseconds);
  };
}

/** The address of a page, with those parameters that have a value; a list gives one parameter for each of its values. */
export function address(path, parameters = {}) {
  const pairs = Object.entries(parameters).flatMap(([name, value]) => (Array.isArray(value) ? value : [value]).map((one) => [name, one]));
  const query = new URLSearchParams(pairs.filter(([, value]) => value !== null && value !== undefined && value !== ""));
  return query.size ? `${path}?${query}` : path;
}

/** The class that an address names, or "". Addresses have U+FFFD for what is not valid Unicode in a name. */
export function classIn(query, run) {
  const names = run.classes.map(({ name }) => name);
  const asked = query.get("class");
  const writtenSo = names.filter((name) => name.replace(/\p{Surrogate}/gu, "\ufffd") === asked);
  return names.includes(asked) ? asked : writtenSo.length === 1 ? writtenSo[0] : "";
}

/** Changes the address without leaving the page. */
export function readdress(parameters) {
  history.replaceState(null, "", address(location.pathname, parameters));
}

export function problemBox(error, ...more) {
  return make("div", { class: "problem", role: "alert" }, make("strong", {}, "That did not work. "), error.message, ...more);
}

/** Sends what changes something; only pages of this server know the token. It is another one after a restart. */
export async function post(run, path, body = {}) {
  const send = () => request(path, { method: "POST", headers: { "Content-Type": "application/json", "X-Likethat-Edit": run.edit_token }, body: JSON.stringify(body) });
  try {
    return await send();
  } catch (error) {
    if (error.status !== 403) throw error;
    run.edit_token = (await request("/api/run")).edit_token;
    return send();
  }
}

const POLL = 400; // milliseconds between looks at how far long work is

/** Looks at long work until it is done or has failed. */
export async function watch(path, state, signal, show) {
  while (state.state === "working") {
    show(state.progress);
    await new Promise((done) => setTimeout(done, POLL));
    state = await request(path, { signal });
  }
  return state;
}

export function progressBar({ task, done, total }) {
  return make("div", { class: "progress" }, make("p", {}, make("span", { class: "spinner" }), total ? `${task}: ${done} of ${total}` : `${task}…`),
    make("progress", total ? { max: total, value: done, "aria-label": task } : { "aria-label": task }));
}
