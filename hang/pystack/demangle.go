package pystack

import (
	"strings"

	cxx "github.com/ianlancetaylor/demangle"
)

// demangle makes c10d::Reducer::finalize_backward of _ZN4c10d7Reducer17finalize_backwardEv: the qualified name of a
// C++ function, without the arguments of functions and templates, in at most maxName bytes. It leaves a name that it
// does not understand as it is. A name takes some 30 us, so an image keeps the names of its functions.
func demangle(symbol string) string {
	if len(symbol) > maxName || !strings.HasPrefix(symbol, "_Z") {
		return symbol
	}
	return cxx.Filter(symbol, cxx.NoParams, cxx.NoTemplateParams, cxx.NoEnclosingParams, cxx.NoClones, cxx.NoABITags,
		cxx.MaxLength(12))
}
