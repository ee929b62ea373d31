// The OpenAPI document as a page.
import { make, request } from "./dom.js";

function nameOf(schema) {
  if (!schema) return "";
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.anyOf) return schema.anyOf.map(nameOf).filter((name) => name !== "null").join(" or ");
  if (schema.type === "array") return `list of ${nameOf(schema.items)}`;
  if (schema.additionalProperties?.type) return `${nameOf(schema.additionalProperties)} by name`;
  return schema.type ?? "";
}

function table(heads, rows) {
  return make("div", { class: "scroll" }, make("table", {}, make("thead", {}, make("tr", {}, ...heads.map((head) => make("th", { scope: "col" }, head)))),
    make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map((cell) => make("td", {}, cell)))))));
}

function operation(path, method, { summary, description, parameters = [], requestBody, responses }) {
  const rows = parameters.map(({ name, schema, description }) => [make("code", {}, name), nameOf(schema), description ?? "", String(schema.default ?? "")]);
  return make("section", {},
    make("h2", {}, make("code", {}, `${method.toUpperCase()} ${path}`)),
    make("p", {}, summary), description && make("p", { class: "soft" }, description.replaceAll("`", "")),
    requestBody && make("p", {}, requestBody.description.replaceAll("`", ""), " Sent as ", Object.keys(requestBody.content).join(", "), "."),
    rows.length ? table(["Parameter", "Type", "Meaning", "Default"], rows) : "",
    table(["Answer", "Content"], Object.entries(responses).map(([status, { content }]) =>
      [status, Object.entries(content ?? {}).map(([kind, { schema }]) => `${kind} ${nameOf(schema)}`).join(", ")])));
}

export async function api({ main, run, signal }) {
  const document_ = await request("/openapi.json", { signal });
  document.title = `API – ${run.name}`;
  const schemas = Object.entries(document_.components?.schemas ?? {});
  main.replaceChildren(make("div", { class: "docs" },
    make("h1", {}, "API"),
    make("p", { class: "soft" }, document_.info.description, " This page shows the ", make("a", { href: "/openapi.json", target: "_blank" }, "OpenAPI document"), "."),
    make("pre", { tabindex: 0 }, `curl -F file=@picture.jpg ${location.origin}/api/explain`),
    ...Object.entries(document_.paths).flatMap(([path, methods]) => Object.entries(methods).map(([method, told]) => operation(path, method, told))),
    make("section", {}, make("h2", {}, "Types"), ...schemas.map(([name, { properties = {}, required = [] }]) =>
      make("details", {}, make("summary", {}, make("code", {}, name)),
        table(["Field", "Type", "Meaning"], Object.entries(properties).map(([field, schema]) => [make("code", {}, field + (required.includes(field) ? "" : "?")), nameOf(schema), schema.description ?? ""])))))));
}
