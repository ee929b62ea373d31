// Search within the page. The theme's own search runs in a worker, which browsers refuse to pages opened from the disk.
"use strict";

document.addEventListener("DOMContentLoaded", () => {
  const query = document.getElementById("mkdocs-search-query");
  const results = document.getElementById("mkdocs-search-results");
  let ready; // a promise of the index, made when the search is first used

  const load = (name) =>
    new Promise((resolve, reject) => {
      const script = document.createElement("script");
      script.src = `${base_url}/search/${name}`;
      script.onload = resolve;
      script.onerror = () => reject(new Error(`cannot load ${script.src}`));
      document.head.append(script);
    });

  const build = async () => {
    await load("lunr.js");
    await load("search_index.js");
    lunr.tokenizer.separator = new RegExp(searchIndex.config.separator);
    const documents = new Map(searchIndex.docs.map((doc) => [doc.location, doc]));
    const index = lunr(function () {
      this.ref("location");
      this.field("title", { boost: 10 });
      this.field("text");
      // Pages that were written to be read come before the reference of the package's inside.
      const boost = ({ location }) => (/^api\/(?!index)/.test(location) ? 1 : 3);
      searchIndex.docs.forEach((doc) => this.add(doc, { boost: boost(doc) }));
    });
    return { documents, index };
  };

  // Every word must occur, or begin a word that does; whole words count more.
  const find = ({ documents, index }, text) => {
    const told = lunr.tokenizer(text).filter((token) => lunr.stopWordFilter(token));
    const words = told.flatMap((token) => index.pipeline.runString(token.toString()));
    if (!words.length) return [];
    const found = index.query((q) => {
      for (const word of words) {
        q.term(word, { presence: lunr.Query.presence.REQUIRED, wildcard: lunr.Query.wildcard.TRAILING, usePipeline: false });
        q.term(word, { boost: 10, usePipeline: false });
      }
    });
    return found.slice(0, 30).map(({ ref }) => ({ ...documents.get(ref), word: words[0] }));
  };

  const around = (text, word) => {
    const start = Math.max(0, text.toLowerCase().indexOf(word) - 60);
    return (start ? "…" : "") + text.slice(start, start + 200);
  };

  const element = (tag, text) => Object.assign(document.createElement(tag), { textContent: text });

  const show = ({ location, title, text, word }) => {
    const link = Object.assign(element("a", title), { href: `${base_url}/${location}` });
    const article = document.createElement("article");
    article.append(element("h3", ""), element("p", `${location.split(".html")[0]}: ${around(text, word)}`));
    article.firstChild.append(link);
    return article;
  };

  const search = async () => {
    ready ??= build();
    const built = await ready;
    const found = find(built, query.value);
    const none = query.value ? [element("p", results.dataset.noResultsText)] : [];
    results.replaceChildren(...(found.length ? found.map(show) : none));
  };

  query.addEventListener("input", search);
  query.form.addEventListener("submit", (event) => event.preventDefault());
});
