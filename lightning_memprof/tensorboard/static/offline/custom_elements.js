// Custom elements and shadow roots of version 0, which browsers removed in 2020: the part that the trace viewer of
// torch-tb-profiler and its Polymer 1 use: https://www.w3.org/TR/2014/WD-custom-elements-20140624/
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

  // Set an element's prototype. Polymer reads the mark `__upgraded__`.
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

  // A node and its descendants, parents first; a callback can move later nodes, so children are read lazily.
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

  // Attribute changes call the element's callback, once even if a definition extends another.
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
      // A template's content belongs to another document and is upgraded later.
      if (made.ownerDocument === document) upgradeTree(made);
      return made;
    };
  }

  // Current browsers allow shadow roots on few elements, and use `slot` instead of version 0's `content`.
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

  // A child carries the shadow root that its parent cannot have; the parent's children move into it.
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
  // The polyfill that the viewer expects wraps nodes; here a node is its own wrapper.
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
