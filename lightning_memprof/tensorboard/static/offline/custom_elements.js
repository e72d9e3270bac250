// Custom elements and shadow roots as browsers had them until 2020 (version 0), as far as the trace viewer of
// torch-tb-profiler and its Polymer 1 ask for them: https://www.w3.org/TR/2014/WD-custom-elements-20140624/
'use strict';

(() => {
  const definitions = new Map();
  const attached = new WeakSet();
  const create = document.createElement;

  // The definition of `<name>`, or of `<basic is="name">`.
  function definitionOf(element) {
    const extended = definitions.get(element.getAttribute('is') || '');
    if (extended?.basic === element.localName) return extended;
    const own = definitions.get(element.localName);
    return own && !own.basic ? own : undefined;
  }

  // Give an element its prototype. Polymer asks for the mark `__upgraded__` by that name.
  function upgrade(element) {
    if (element.nodeType !== Node.ELEMENT_NODE || element.__upgraded__) return;
    const definition = definitionOf(element);
    if (!definition) return;
    if (definition.basic) element.setAttribute('is', definition.name);
    Object.setPrototypeOf(element, definition.prototype);
    element.__upgraded__ = true;
    element.createdCallback?.();
  }

  function attach(element) {
    if (!element.__upgraded__ || !element.isConnected || attached.has(element)) return;
    attached.add(element);
    element.attachedCallback?.();
  }

  function detach(element) {
    if (element.isConnected || !attached.delete(element)) return;
    element.detachedCallback?.();
  }

  // A node and all below it, parents first; a callback may move what follows, so children are read as they then are.
  function eachElement(node, call) {
    if (node.nodeType === Node.ELEMENT_NODE) call(node);
    const roots = node.shadowRoot ? [node.shadowRoot, node] : [node];
    for (const root of roots) for (const child of [...root.childNodes]) eachElement(child, call);
  }

  const upgradeTree = node => eachElement(node, upgrade);

  function handle(records) {
    for (const {addedNodes, removedNodes} of records) {
      for (const node of addedNodes) {
        eachElement(node, element => {
          upgrade(element);
          attach(element);
        });
      }
      for (const node of removedNodes) eachElement(node, detach);
    }
  }

  const observer = new MutationObserver(handle);
  const takeRecords = () => handle(observer.takeRecords());

  // Attributes that are set through the element tell it so, once where a definition builds on another.
  function watchAttributes(prototype) {
    if (prototype.setAttribute.name === 'watched') return;
    for (const change of ['setAttribute', 'removeAttribute']) {
      const original = prototype[change];
      prototype[change] = function watched(name, ...values) {
        const before = this.getAttribute(name);
        original.call(this, name, ...values);
        const after = this.getAttribute(name);
        if (before !== after) this.attributeChangedCallback?.(name, before, after);
      };
    }
  }

  document.registerElement = function registerElement(name, {prototype, extends: basic} = {}) {
    const definition = {name, basic, prototype: prototype || Object.create(HTMLElement.prototype)};
    if (definitions.has(name)) throw new DOMException(`${name} is registered already`, 'NotSupportedError');
    definitions.set(name, definition);
    watchAttributes(definition.prototype);
    eachElement(document, element => {
      if (definitionOf(element) !== definition) return;
      upgrade(element);
      attach(element);
    });
    function Constructor() {
      return document.createElement(basic || name, basic ? name : undefined);
    }
    Constructor.prototype = definition.prototype;
    Object.defineProperty(definition.prototype, 'constructor', {value: Constructor, configurable: true, writable: true});
    return Constructor;
  };

  document.createElement = function createElement(name, is) {
    const made = create.call(document, name);
    if (typeof is === 'string') made.setAttribute('is', is);
    upgrade(made);
    return made;
  };

  for (const [owner, method] of [[Node.prototype, 'cloneNode'], [Document.prototype, 'importNode']]) {
    const original = owner[method];
    owner[method] = function copied(...given) {
      const made = original.apply(this, given);
      // What lies in a template belongs to a document of its own, and waits.
      if (made.ownerDocument === document) upgradeTree(made);
      return made;
    };
  }

  // Today's roots take elements with a name of a few kinds only, and say `slot` where version 0 said `content`.
  Element.prototype.createShadowRoot = function createShadowRoot() {
    let root;
    try {
      root = this.attachShadow({mode: 'open'});
    } catch {
      root = innerHost(this).attachShadow({mode: 'open'});
    }
    const rename = () => {
      for (const content of root.querySelectorAll('content')) content.replaceWith(create.call(document, 'slot'));
    };
    new MutationObserver(rename).observe(root, {childList: true, subtree: true});
    observer.observe(root, {childList: true, subtree: true});
    return root;
  };

  // A child with the shadow root that its parent must not have; what the parent is given goes into it.
  function innerHost(element) {
    const host = create.call(document, 'div');
    host.style.display = 'contents';
    const move = () => {
      for (const child of [...element.childNodes]) if (child !== host) host.append(child);
    };
    element.append(host);
    move();
    new MutationObserver(move).observe(element, {childList: true});
    return host;
  }

  observer.observe(document, {childList: true, subtree: true});
  Object.defineProperty(document, '_currentScript', {get: () => document.currentScript});
  window.WebComponents = {};
  // The polyfill that the viewer expects wraps nodes; here a node is itself.
  window.wrap = node => node;
  window.unwrap = node => node;
  window.CustomElements = {
    hasNative: false, useNative: false, ready: false, takeRecords, upgrade, upgradeDocumentTree: upgradeTree,
    instanceof: (object, constructor) => object instanceof constructor,
  };
  document.addEventListener('DOMContentLoaded', () => {
    takeRecords();
    window.CustomElements.ready = true;
    document.dispatchEvent(new CustomEvent('WebComponentsReady', {bubbles: true}));
  });
})();
