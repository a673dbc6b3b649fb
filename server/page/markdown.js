// Turns a stream of Markdown into elements: decides which block a line begins or continues.

const LONGEST_MARK = 500; // characters of a line after which its kind is certain

const ROWS = 300; // of a table, which goes on in another one: a browser lays out a whole table anew whenever it grows

const FENCE = /^( *)(`{3,}|~{3,}) *([^`\n]*)$/;
const ITEM = /^( *)([-*+]|(\d{1,9})[.)]) +(?:\[([ xX])\] +)?(?=\S)/;
const HEADING = /^ {0,3}(#{1,6}) +(?=\S)/;
const QUOTE = /^ {0,3}> ?/;
const NOTE = /^ {0,3}\[\^(\d{1,3})\]: +(?=\S)/;
const TABS = /^ *\t[ \t]*/; // at the beginning of a line
const RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/;
const RULER = /^ *\|? *:?-+:? *(?:\| *:?-+:? *)*\|? *$/; // between the head of a table and its rows
/** Beginnings of a line that may still become another kind of line. */
const UNDECIDED = /^ *(?:(?:[-*+_]|\d{1,9}[.)]?) *(?: \[(?:[ xX]?|[ xX]\] *))?|\[(?:\^(?:\d{1,3}(?:\](?:: *)?)?)?)?|#{1,6} *|>[ \t]*|`{1,2}|`{3,}[^`]*|~{1,2}|~{3,}.*|([-*_])(?: *\1)* *|[|:\- ]*)?$/;

/** Writes Markdown into an element piece by piece: `write` any text, then `flush` once a frame. */
class Markdown {
  #half = ""; // what may be the first half of a line's end
  #rest = ""; // the line so far, while its kind is not known
  #open = null; // the block that gets the line's characters, once it is known
  #block = null; // what the next line may continue: words, code or a table
  #lists = []; // the open lists, each in an item of the previous one
  #blank = false; // whether the last line was empty
  #quote = null;
  #rows = null; // the table's element; `#aligns` has the alignment of its columns
  #aligns = [];
  #dirty = new Set();
  #room = roomOf();

  constructor(target) {
    this.target = target;
    target.replaceChildren();
  }

  write(text) {
    const all = this.#half + text;
    this.#half = all.endsWith("\r") ? "\r" : "";
    const lines = all.slice(0, all.length - this.#half.length).replaceAll("\r\n", "\n").split("\n");
    lines.forEach((piece, index) => {
      if (index) this.#newline();
      if (piece) this.#piece(piece);
    });
  }

  /** Ends the text. */
  end() {
    if (this.#half) this.#piece(this.#half);
    this.#half = "";
    if (this.#rest) this.#begin(this.#rest, true);
    this.#endLine();
    this.flush();
    this.#block?.close?.();
  }

  flush() {
    for (const open of this.#dirty) open.flush();
    this.#dirty.clear();
  }

  #piece(piece) {
    if (this.#open) return this.#put(piece);
    this.#rest += piece;
    if (!(this.#block instanceof Code)) this.#rest = this.#rest.replace(TABS, (space) => space.replaceAll("\t", "    "));
    if (this.#settled(this.#rest)) this.#begin(this.#rest, false);
  }

  #newline() {
    if (!this.#open) this.#begin(this.#rest, true);
    this.#endLine();
  }

  #endLine() {
    if (this.#open instanceof Row) {
      this.#open.complete();
      this.#dirty.add(this.#open);
    }
    this.#open = null;
  }

  #settled(line) {
    if (line.length > LONGEST_MARK) return true;
    if (this.#block instanceof Code) return !/^\s*(?:`*|~*)\s*$/.test(line);
    if (this.#inFormula) return line.trim();
    if (this.#block instanceof Row && !line.includes("|")) return false;
    return !UNDECIDED.test(line);
  }

  /** Begins the block of a line, or continues one; `whole`: the line is complete. */
  #begin(line, whole) {
    this.#rest = "";
    if (this.#block instanceof Code) return this.#codeLine(line);
    if (!line.trim()) {
      this.#block = this.#quote = null;
      this.#blank = true;
      return undefined;
    }
    const indent = /^ */.exec(line)[0].length;
    if (this.#inFormula) return this.#words(line, indent);
    const fence = whole && FENCE.exec(line);
    if (fence) return this.#fence(fence, indent);
    if (whole && this.#isRuler(line)) return this.#table(line);
    if (this.#block instanceof Row && line.includes("|")) return this.#row(line, "td");
    if (whole && RULE.test(line)) {
      this.#leave(indent);
      this.#add(make("hr"));
      return this.#none();
    }
    for (const [kind, take] of [[ITEM, this.#item], [HEADING, this.#heading], [QUOTE, this.#quoted], [NOTE, this.#note]]) {
      const match = kind.exec(line);
      if (match) return take.call(this, match, line.slice(match[0].length), indent);
    }
    return this.#words(line, indent);
  }

  #words(line, indent) {
    if (this.#block instanceof InlineText && !this.#blank) {
      this.#block.lines += 1;
      this.#open = this.#block;
      return this.#put(`\n${line.trimStart()}`);
    }
    if (this.#blank) this.#leave(indent);
    return this.#start(make("p"), line.trimStart());
  }

  #heading([, signs], text) {
    this.#leave(0);
    this.#start(make(`h${Math.min(6, signs.length + 2)}`), text); // below the levels of the page's own headings
    this.#block = null; // it has one line
  }

  #quoted(_match, text) {
    this.#lists = [];
    if (!this.#quote) this.#target.append(this.#quote = make("blockquote"));
    this.#blank = false;
    if (!text.trim()) { this.#block = null; return this.#none(); }
    if (this.#block instanceof InlineText && this.#block.element.parentNode === this.#quote) {
      this.#open = this.#block;
      return this.#put(`\n${text.trimStart()}`);
    }
    const paragraph = make("p");
    this.#quote.append(paragraph);
    return this.#into(new InlineText(paragraph, this.#room), text);
  }

  #note([, number], text) {
    this.#leave(0);
    const paragraph = make("p", "footnote");
    paragraph.dataset.note = number;
    this.#add(paragraph);
    return this.#into(new InlineText(paragraph, this.#room, make("sup", "", number)), text);
  }

  #item([, , sign, number, task], text, indent) {
    this.#quote = null;
    while (this.#lists.length && indent < this.#lists.at(-1).indent) this.#lists.pop();
    const name = number === undefined ? "ul" : "ol";
    let list = this.#lists.at(-1);
    const deeper = !list || indent >= list.indent + 2;
    if (list && !deeper && list.element.localName !== name) {
      this.#lists.pop();
      list = null;
    }
    if (!list || deeper) {
      if (this.#lists.length >= 12) return this.#words(`${sign} ${text}`, indent);
      const element = make(name);
      if (number !== undefined && number !== "1") element.start = Number(number);
      this.#target.append(element);
      list = { element, indent, item: null };
      this.#lists.push(list);
    }
    list.item = make("li");
    list.element.append(list.item);
    this.#blank = false;
    const box = task && Object.assign(make("input", "", "", "Done"), { type: "checkbox", disabled: true, checked: task !== " " });
    return this.#into(new InlineText(list.item.appendChild(make("p")), this.#room, ...(box ? [box] : [])), text);
  }

  #fence([, spaces, fence, language], indent) {
    if (this.#blank || indent === 0) this.#leave(indent);
    const code = new Code(fence, spaces.length, visible(language.trim().slice(0, 40)), this.#room);
    this.#add(code.element);
    this.#block = code;
    return this.#none();
  }

  #codeLine(line) {
    const code = this.#block, bare = line.trim();
    if (bare.startsWith(code.fence) && bare === code.fence[0].repeat(bare.length)) {
      code.close();
      this.#block = null;
      return this.#none();
    }
    const text = line.slice(Math.min(code.indent, /^ */.exec(line)[0].length));
    this.#open = code;
    this.#put(code.lines ? `\n${text}` : text);
    code.lines += 1;
    return undefined;
  }

  #isRuler(line) {
    const head = this.#block;
    if (!(head instanceof InlineText) || head.lines !== 1 || this.#blank || !RULER.test(line)) return false;
    return head.wholeText.includes("|") && cells(head.wholeText).length === cells(line).length;
  }

  #table(line) {
    const head = this.#block, text = head.wholeText;
    const aligns = cells(line).map((cell) => (/^:-+:$/.test(cell) ? "middle" : /-:$/.test(cell) ? "right" : "left"));
    const box = region("div", "table", "", "Table"), table = make("table");
    head.element.replaceWith(box);
    this.#dirty.delete(head);
    box.append(table);
    this.#rows = table;
    this.#aligns = aligns;
    this.#row(text, "th");
    return this.#none();
  }

  #row(line, cell) {
    if (this.#rows.childElementCount === ROWS) {
      const more = make("table");
      this.#rows.after(more);
      this.#rows = more;
    }
    const element = make("tr");
    this.#rows.append(element);
    return this.#into(new Row(element, cell, this.#aligns, this.#room), line);
  }

  /** Ends the quote, and the lists to whose items a line with this indent does not belong. */
  #leave(indent) {
    this.#quote = null;
    while (this.#lists.length && indent < this.#lists.at(-1).indent + 2) this.#lists.pop();
  }

  /** Whether the last line has opened a formula; in a quote, each line begins anew. */
  get #inFormula() { return this.#block instanceof InlineText && !this.#quote && !this.#blank && this.#block.opensFormula; }

  get #target() { return this.#lists.at(-1)?.item ?? this.target; }

  #add(element) {
    this.#target.append(element);
    this.#block = this.#quote = null;
    this.#blank = false;
  }

  #start(element, text) {
    this.#add(element);
    return this.#into(new InlineText(element, this.#room), text);
  }

  #into(block, text) {
    this.#blank = false;
    this.#block = this.#open = block;
    return this.#put(text);
  }

  #none() {
    this.#open = { write() {}, flush() {} };
  }

  #put(text) {
    this.#open.write(text);
    this.#dirty.add(this.#open);
  }
}
