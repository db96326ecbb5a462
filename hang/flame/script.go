package flame

import _ "embed"

// script searches and magnifies. The picture is complete without it.
//
//go:embed script.js
var script string
