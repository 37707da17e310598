// Elements, and the text of answers as it is shown: only ever as text.

/** An element with classes, text and children. */
export function made(tag, className = "", ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

/** Text as paragraphs and blocks of code, which stand between lines of three backticks. */
export function shown(text) {
  const found = document.createDocumentFragment();
  for (const [index, part] of text.split(/^ *```/m).entries()) {
    if (index % 2) {
      found.append(block(part.slice(part.indexOf("\n") + 1 || part.length).replace(/\n$/, "")));
    } else if (part.trim()) {
      found.append(made("p", "", ...inline(part.replace(/^\n+|\s+$/g, ""))));
    }
  }
  return found;
}

const inline = (text) => text.split(/`([^`\n]+)`/).map((part, index) => (index % 2 ? made("code", "", part) : part));

/** Code, which may have to be scrolled. */
export function block(text) {
  const found = made("pre", "", made("code", "", text));
  found.tabIndex = 0;
  return found;
}

/** A call of a tool, {name, arguments}, with arguments as far as they came. */
export function called({ name, arguments: text }) {
  return made("div", "call", made("p", "", "Calls ", made("code", "", name)), block(pretty(text) ?? text));
}

/** JSON with a line for each item, all numbers and texts as they were written; null for what is no object or list. */
export function pretty(text) {
  try {
    if (typeof (JSON.parse(text) ?? 0) !== "object") return null;
  } catch {
    return null;
  }
  let depth = 0;
  const line = (deeper) => "\n" + "  ".repeat((depth += deeper));
  const parts = text.match(/"(?:[^"\\]|\\.)*"|\{\s*\}|\[\s*\]|[{}[\],:]|[^\s{}[\],:"]+/g);
  const spaced = (part) => {
    if (part === "{" || part === "[") return part + line(1);
    if (part === "}" || part === "]") return line(-1) + part;
    return part + (part === "," ? line(0) : part === ":" ? " " : "");
  };
  return parts.map(spaced).join("");
}
