// What the page asks of the server: answers as they come, models, and what it is doing.

const KEY = "edgellm-key";

/** The key that requests have; it is forgotten with the tab. */
export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

/** What the server refused or failed with, in its own words. */
export class ServerError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/** The response to a request. Throws ServerError for one that is not answered, and where nobody answers. */
async function request(path, options = {}) {
  const headers = { ...options.headers, ...(key.get() && { authorization: `Bearer ${key.get()}` }) };
  const response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" }).catch((error) => {
    throw error.name === "AbortError" ? error : new ServerError("The server does not answer.");
  });
  if (response.ok) return response;
  const said = await response.json().catch(() => null); // a proxy may have answered, with a page of its own
  let message = said?.error?.message ?? `${response.status} ${response.statusText}`;
  const seconds = response.headers.get("retry-after");
  if (response.status === 429 && seconds) message += ` (Try again in ${seconds} s.)`;
  throw new ServerError(message, response.status);
}

/** The data of each server-sent event of a response, which is one line. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trim();
  }
}

/**
 * The pieces of an answer: {content, reasoning, calls, finish, usage}, each with what came of it; all have `dropped`: how
 * many messages, the oldest, were left out for want of room.
 */
export async function* answer(body, signal) {
  const sent = JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } });
  const headers = { "content-type": "application/json" };
  const response = await request("v1/chat/completions", { method: "POST", headers, body: sent, signal });
  const dropped = Number(response.headers.get("edgellm-dropped-messages"));
  try {
    for await (const data of events(response)) {
      if (data === "[DONE]") return;
      const { error, choices, usage } = JSON.parse(data);
      if (error) throw new ServerError(error.message);
      const { delta = {}, finish_reason, stop_reason } = choices[0] ?? {};
      const finish = stop_reason === "context" ? stop_reason : finish_reason;
      const said = { content: delta.content ?? "", reasoning: delta.reasoning_content ?? "" };
      yield { ...said, calls: delta.tool_calls ?? [], finish, usage, dropped };
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ServerError) throw error;
    throw new ServerError("The connection has broken off.");
  }
  throw new ServerError("The answer has broken off.");
}

/** The model and its adapters, as [{id, parent, max_model_len, description}]; few models have the last. */
export async function models() {
  return (await (await request("v1/models")).json()).data;
}

/** How the server is: "loading", "ready", "ending", "failed", with an error where it has one. */
async function health() {
  const asked = fetch("health", { cache: "no-store", credentials: "omit" });
  return asked.then((response) => response.json()).catch(() => ({ status: "unreachable" }));
}

/** The values of /metrics by name, without labels: the sum over these. */
async function metrics() {
  const text = await (await request("metrics")).text();
  const found = {};
  for (const [, name, value] of text.matchAll(/^edgellm_(\w+)(?:\{.*\})? (\S+)$/gm)) {
    found[name] = (found[name] ?? 0) + Number(value);
  }
  return found;
}

/**
 * Show what the server does, every second as long as the page can be seen.
 *
 * `show` gets {status, error, speeds, gain, waiting, running, model, free}: tokens a second in the last minute, tokens
 * that a request got each time it got some (in the last ten seconds in which any came), requests, and bytes. Without a
 * key that is taken, and where nobody answers, there are only the first two.
 */
export async function watch(show) {
  const samples = [];
  let gain = null;
  for (;;) {
    const state = await health();
    try {
      const now = { ...(await metrics()), at: performance.now() };
      const last = samples.at(-1);
      if (last && now.tokens_total < last.tokens_total) samples.length = 0; // another server, from zero
      samples.push(now);
      if (samples.length > 61) samples.shift();
      const before = samples.at(-11) ?? samples[0];
      const steps = now.steps_total - before.steps_total;
      if (steps) gain = (now.tokens_total - before.tokens_total) / steps;
      const rate = (sample, index) =>
        (1000 * (samples[index + 1].tokens_total - sample.tokens_total)) / (samples[index + 1].at - sample.at);
      const seen = { waiting: now.requests_waiting, running: now.requests_running };
      const memory = { model: now.model_memory_bytes, free: now.available_memory_bytes };
      show({ ...state, speeds: samples.slice(0, -1).map(rate), gain, ...seen, ...memory });
    } catch (error) {
      show(error.status === 401 ? { status: "needs a key" } : state);
    }
    await new Promise((resolve) => setTimeout(resolve, 1000));
    if (document.hidden) {
      await new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
      samples.length = 0;
    }
  }
}
