// The conversation: questions, pictures, settings, and answers as they come. Text of the model is only ever text.

import { cameraPicture, closeCamera, dataURL, openCamera } from "./pictures.js";
import { ServerError, answer, key, models, watch } from "./server.js";
import { block, called, made, pretty, shown } from "./text.js";

const find = (id) => document.getElementById(id);

/** Let an element have a text; what reads the page aloud is told of changes alone. */
function write(id, text) {
  if (find(id).textContent !== text) find(id).textContent = text;
}

/** What the conversation has so far: {text, pictures, answer, reasoning, calls, element, hasLeft}. */
let turns = [];
/** How many tokens the model's context has. */
let context = null;
/** Of the answer that comes now; null where none does. */
let running = null;
let pictures = [];

// ---- Turns
/** The calls of a turn that were not cut. */
const calls = (turn) => turn.calls.filter((call) => pretty(call.arguments) !== null);

/** What was answered before a turn, and has not left the context. */
function earlier(turn) {
  const end = turns.includes(turn) ? turns.indexOf(turn) : turns.length;
  return turns.slice(0, end).filter((each) => !each.hasLeft && (each.answer || calls(each).length));
}

/** The messages of a request: what was answered before a turn, and that. */
function messages(turn) {
  const found = find("system").value.trim() ? [{ role: "system", content: find("system").value }] : [];
  for (const each of [...earlier(turn), turn]) {
    const images = each.pictures.map((url) => ({ type: "image_url", image_url: { url } }));
    const text = each.text ? [{ type: "text", text: each.text }] : [];
    found.push({ role: "user", content: images.length ? [...images, ...text] : each.text });
    if (each === turn) break;
    const sent = calls(each).map(({ id, ...rest }) => ({ id, type: "function", function: rest }));
    found.push({ role: "assistant", content: each.answer || null, ...(sent.length && { tool_calls: sent }) });
  }
  return found;
}

/** Let the oldest turns leave, of `count` messages, two each, which a turn had no room for: they are not sent again. */
function leave(turn, count) {
  const left = earlier(turn).slice(0, count / 2);
  for (const each of left) {
    each.hasLeft = true;
    each.element.classList.add("left");
  }
  const oldest = left.length === 1 ? "The oldest question has" : `The oldest ${left.length} questions have`;
  const why = "left the context, which was full: the model sees what follows.";
  turn.element.prepend(made("p", "facts", `${oldest} ${why}`));
}

/** A turn's element, with places for what comes of the answer. */
function draw(turn) {
  const images = turn.pictures.map((url) => picture(url, "Picture of this question"));
  const asked = made("div", "asked", made("span", "hidden", "You: "), ...images, made("p", "", turn.text));
  turn.reasoningBox = made("details", "reasoning", made("summary", "", "Reasoning"), made("p"));
  turn.reasoningBox.hidden = true;
  turn.said = made("div", "said");
  turn.called = made("div");
  turn.facts = made("p", "facts");
  const parts = [made("span", "hidden", "Model: "), turn.reasoningBox, turn.said, turn.called, turn.facts];
  turn.answered = made("div", "answered", ...parts);
  turn.element = made("li", "", asked, turn.answered);
  find("turns").append(turn.element);
}

const picture = (src, alt) => Object.assign(made("img"), { src, alt });

function button(text, act) {
  const found = Object.assign(made("button", "quiet", text), { type: "button" });
  found.addEventListener("click", act);
  return found;
}

/** Show what there is of an answer, and follow it where its end was in sight. */
function update(turn) {
  const box = find("conversation");
  const follows = box.scrollHeight - box.scrollTop - box.clientHeight < 80;
  turn.reasoningBox.hidden = !turn.reasoning;
  turn.reasoningBox.lastChild.textContent = turn.reasoning;
  const json = turn.finished ? pretty(turn.answer) : null;
  turn.said.replaceChildren(json === null ? shown(turn.answer) : block(json));
  turn.called.replaceChildren(...turn.calls.map(called));
  if (follows) box.scrollTop = box.scrollHeight;
  return 0;
}

const ENDS = {
  length: "ended at the most tokens",
  context: "ended where the context is full",
  stopped: "stopped",
  tool_calls: "a call, which nothing here runs",
};

/** What an answer took, as one line. */
function facts({ usage, finish }, times) {
  const found = [];
  if (usage) {
    const [count, seconds] = [usage.completion_tokens, (times.last - times.first) / 1000];
    found.push(count === 1 ? "1 token" : `${count} tokens`);
    if (seconds > 0) found.push(`${short((count - 1) / seconds)} tokens/s`);
  }
  if (times.first) found.push(`first after ${((times.first - times.begin) / 1000).toFixed(2)} s`);
  if (usage && context) {
    const share = Math.round((100 * usage.total_tokens) / context);
    found.push(`context ${share} % full: ${usage.total_tokens} of ${context} tokens`);
  }
  const reused = usage?.prompt_tokens_details?.cached_tokens;
  if (reused) found.push(`${reused} of ${usage.prompt_tokens} prompt tokens reused`);
  return [...found, ENDS[finish] ?? []].flat().join(" · ");
}

/** Ask the model a turn, and show the answer as it comes; asks for the key where the server does. */
async function ask(turn) {
  const body = request(turn);
  if (body === null || running) return;
  Object.assign(turn, { answer: "", reasoning: "", calls: [], finish: null, usage: null, finished: false });
  turn.element.querySelector(".failed")?.remove();
  setRunning(turn, new AbortController());
  const times = { begin: performance.now() };
  let [frame, hasDropped] = [0, false];
  try {
    await withKey(async () => {
      for await (const piece of answer(body, running.signal)) {
        times.last = performance.now();
        if (piece.dropped && !hasDropped) leave(turn, piece.dropped);
        hasDropped = true;
        const hasMore = piece.content || piece.reasoning || piece.calls.length;
        if (hasMore) times.first ??= times.last;
        turn.answer += piece.content;
        turn.reasoning += piece.reasoning;
        for (const { index, id, function: part } of piece.calls) {
          turn.calls[index] ??= { id, name: part.name, arguments: "" };
          turn.calls[index].arguments += part.arguments ?? "";
        }
        turn.finish = piece.finish ?? turn.finish;
        turn.usage = piece.usage ?? turn.usage;
        if (hasMore) turn.answered.classList.remove("waits");
        frame ||= requestAnimationFrame(() => (frame = update(turn)));
      }
    });
  } catch (error) {
    if (error.name === "AbortError") turn.finish = "stopped";
    else fail(turn, error);
  }
  cancelAnimationFrame(frame);
  turn.finished = true;
  turn.facts.textContent = facts(turn, times);
  update(turn);
  setRunning(turn, null);
}

function fail(turn, error) {
  if (!(error instanceof ServerError)) console.error(error);
  const again = button("Try again", () => ask(turn));
  const failed = made("div", "failed", made("p", "wrong", error.message), again);
  failed.setAttribute("role", "alert");
  turn.answered.append(failed);
  failed.scrollIntoView({ block: "nearest" });
}

/** The body of a request; null, and what is wrong is said, where a setting is. */
function request(turn) {
  const found = { model: find("model").value, messages: messages(turn), truncation: "auto" };
  const [schema, tools] = [readField("schema"), readField("tools")];
  if (schema === null || tools === null) return openSettings(schema === null ? "schema" : "tools");
  if (tools?.length) found.tools = tools.map((tool) => (tool?.name ? { type: "function", function: tool } : tool));
  if (schema) found.response_format = { type: "json_schema", json_schema: { name: "answer", schema, strict: true } };
  for (const id of ["temperature", "max_tokens"]) {
    if (!find(id).reportValidity()) return openSettings(id);
    if (find(id).value) found[id] = Number(find(id).value);
  }
  return found;
}

const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
const FIELDS = { schema: [isObject, "This is no JSON object."], tools: [Array.isArray, "This is no JSON list."] };

/** What a field of JSON has: undefined where it is empty, null where it is wrong, which is said beside it. */
function readField(id) {
  const text = find(id).value.trim();
  const [isRight, otherwise] = FIELDS[id];
  let [found, wrong] = [undefined, ""];
  try {
    if (text) found = JSON.parse(text);
    if (text && !isRight(found)) wrong = otherwise;
  } catch (error) {
    wrong = `This is no JSON: ${error.message}`;
  }
  write(`${id}-wrong`, wrong);
  find(id).setAttribute("aria-invalid", String(Boolean(wrong)));
  const hint = find("tools").value.trim() ? "The model may call tools" : "Enter sends, Shift+Enter begins a line";
  write("hint", find("schema").value.trim() ? "Answers follow the JSON schema" : hint);
  return wrong ? null : found;
}

// ---- Pictures
async function addFiles(files) {
  for (const file of [...files]) {
    try {
      const url = await dataURL(file);
      setPictures([...pictures, url]);
    } catch {
      write("notice", `${file.name}: the browser finds no picture in it.`);
    }
  }
}

/** Let the question have other pictures. */
function setPictures(urls) {
  pictures = urls;
  const items = pictures.map((url, index) => {
    const remove = button("×", () => setPictures(pictures.filter((_, other) => other !== index)));
    remove.setAttribute("aria-label", `Remove picture ${index + 1}`);
    return made("li", "", picture(url, `Picture ${index + 1}`), remove);
  });
  find("pictures").replaceChildren(...items);
  write("notice", "");
  updateSend();
  find("question").focus();
}

async function showCamera() {
  try {
    await openCamera(find("video"));
    write("notice", "");
    find("camera-dialog").showModal();
  } catch (error) {
    write("notice", error.message);
  }
}

function takePicture() {
  const url = cameraPicture(find("video"));
  if (url === null) return;
  find("camera-dialog").close();
  setPictures([...pictures, url]);
}

// ---- The key
/** What an action gives, asked again with another key as long as the server refuses the one it has. */
async function withKey(action) {
  for (;;) {
    try {
      return await action();
    } catch (error) {
      if (error.status !== 401 || !(await askForKey(error.message))) throw error;
    }
  }
}

let asking = null;

/** Ask for a key; gives whether there is another one. */
function askForKey(why) {
  if (asking) return asking;
  const dialog = find("key-dialog");
  write("key-why", key.get() ? why : "");
  find("asked-key").value = dialog.returnValue = "";
  dialog.showModal();
  asking = new Promise((resolve) => dialog.addEventListener("close", resolve, { once: true })).then(() => {
    asking = null;
    return dialog.returnValue === "taken";
  });
  return asking;
}

function useKey(value) {
  key.set(value.trim());
  find("key").value = key.get();
}

// ---- The server
/** Fill in the models as soon as the server tells them. */
async function showModels() {
  try {
    const known = await withKey(models);
    const options = known.map(({ id, parent }) => new Option(parent ? `${id} (adapter)` : id, id));
    context = known[0].max_model_len;
    write("about", known[0].description ?? "");
    const chosen = find("model").value;
    find("model").replaceChildren(...options);
    if (known.some(({ id }) => id === chosen)) find("model").value = chosen;
    updateSend();
  } catch (error) {
    if (error.status !== 401) setTimeout(showModels, 1000); // it is loading, or away
  }
}

const short = (value) => value.toFixed(value < 100 ? 1 : 0);
const bytes = (count) => (count < 2 ** 30 ? `${(count / 2 ** 20).toFixed(0)} MiB` : `${short(count / 2 ** 30)} GiB`);

/** Show what the server does; see `watch`. */
function showWatch(seen) {
  write("state", seen.status);
  find("state").title = seen.error ?? "";
  find("state").dataset.state = seen.status;
  if (!seen.speeds) return;
  const most = Math.max(...seen.speeds, 0);
  const height = (speed) => (19 - (18 * speed) / (most || 1)).toFixed(2);
  const points = seen.speeds.map((speed, index) => `${60 - seen.speeds.length + index},${height(speed)}`);
  find("course").firstElementChild.setAttribute("points", points.join(" "));
  write("speed", short(seen.speeds.at(-1) ?? 0));
  write("speed-more", `peak ${short(most)}`);
  write("gain", seen.gain?.toFixed(2) ?? "–");
  write("queue", `${seen.waiting} waiting`);
  write("queue-more", `${seen.running} running`);
  write("memory", seen.model ? bytes(seen.model) : "–");
  write("memory-more", `${bytes(seen.free)} free`);
}

// ---- What the reader does
function setRunning(turn, controller) {
  running = controller;
  find("stop").hidden = !running;
  find("send").hidden = Boolean(running);
  turn.answered.setAttribute("aria-busy", String(Boolean(running)));
  turn.answered.classList.toggle("waits", Boolean(running));
}

function updateSend() {
  const isEmpty = !find("question").value.trim() && !pictures.length;
  find("send").disabled = isEmpty || !find("model").value;
}

function send() {
  if (running || find("send").disabled) return;
  const turn = { text: find("question").value.trim(), pictures, answer: "", calls: [] };
  if (request(turn) === null) return;
  find("welcome").hidden = true;
  turns.push(turn);
  draw(turn);
  find("question").value = "";
  setPictures([]);
  find("conversation").scrollTop = find("conversation").scrollHeight;
  ask(turn);
}

function stop() {
  running?.abort();
  find("question").focus();
}

function begin() {
  running?.abort();
  turns = [];
  find("turns").replaceChildren();
  find("welcome").hidden = false;
  setPictures([]);
}

/** Show the settings, and let the reader write into one of them; "" closes them. Gives null. */
function openSettings(id) {
  find("settings").hidden = !id;
  find("settings-button").setAttribute("aria-expanded", String(Boolean(id)));
  find(id || "settings-button").focus();
  return null;
}

const on = (id, event, act) => find(id).addEventListener(event, act);

on("composer", "submit", (event) => send(event.preventDefault()));
on("question", "keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event.preventDefault());
});
on("question", "input", updateSend);
on("stop", "click", stop);
on("new", "click", begin);
for (const id of Object.keys(FIELDS)) on(id, "input", () => readField(id));
on("picture", "click", () => find("file").click());
on("file", "change", async () => {
  await addFiles(find("file").files);
  find("file").value = "";
});
on("camera", "click", showCamera);
on("take", "click", takePicture);
on("camera-cancel", "click", () => find("camera-dialog").close());
on("camera-dialog", "close", () => closeCamera(find("video")));
on("settings-button", "click", () => openSettings(find("settings").hidden ? "system" : ""));
on("settings-close", "click", () => openSettings(""));
on("key", "change", () => {
  useKey(find("key").value);
  showModels();
});
on("asked-key-form", "submit", (event) => {
  event.preventDefault();
  useKey(find("asked-key").value);
  find("key-dialog").close("taken");
});
on("key-cancel", "click", () => find("key-dialog").close());
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
  if (running) stop();
  else if (find("settings").contains(document.activeElement)) openSettings("");
});
document.addEventListener("paste", (event) => addFiles(event.clipboardData.files));
for (const name of ["dragover", "drop"]) {
  document.addEventListener(name, (event) => {
    if (!event.dataTransfer.types.includes("Files")) return;
    event.preventDefault();
    if (name === "drop") addFiles(event.dataTransfer.files);
  });
}

if (window.matchMedia("(min-width: 70rem)").matches) openSettings("question");
find("key").value = key.get();
for (const id of Object.keys(FIELDS)) readField(id);
updateSend();
showModels();
watch(showWatch);
