//go:build cgo && linux

package cuda

/*
#cgo LDFLAGS: -ldl
#include <stdlib.h>
#include "driver.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"runtime"
	"sync"
	"unsafe"
)

// The codes that mean something to us.
const (
	outOfMemory    = 2
	noDevice       = 100
	invalidDevice  = 101
	invalidValue   = 1
	alreadyEnabled = 704
)

// check makes an error of a result. name is the driver's name of the function.
func check(name string, code C.cu_result) error {
	if code == 0 {
		return nil
	}
	var text *C.char
	if C.cuda_error_name(code, &text) != 0 || text == nil {
		return &Error{Call: name, Code: int(code)}
	}
	return &Error{Call: name, Code: int(code), Name: C.GoString(text)}
}

// Driver is the CUDA driver of this machine. There is one in a process; its library is never closed.
type Driver struct{ version int }

// opened keeps the library's functions in place: they are variables of the C side.
var opened = struct {
	sync.Mutex
	library string
}{}

// Open loads the library and initialises the driver. The error is ErrNoDriver, or the driver's own.
func Open(library string) (*Driver, error) {
	if err := load(library); err != nil {
		return nil, err
	}
	if err := check("cuInit", C.cuda_init(0)); err != nil {
		if code(err) == noDevice {
			return nil, fmt.Errorf("%w: %w", ErrNoDriver, err)
		}
		return nil, err
	}
	var version C.int
	if err := check("cuDriverGetVersion", C.cuda_driver_version(&version)); err != nil {
		return nil, err
	}
	return &Driver{version: int(version)}, nil
}

func load(library string) error {
	opened.Lock()
	defer opened.Unlock()
	if opened.library == library {
		return nil
	}
	runtime.LockOSThread() // dlerror is the thread's
	defer runtime.UnlockOSThread()
	name := C.CString(library)
	defer C.free(unsafe.Pointer(name))
	var symbol *C.char
	text := C.cuda_load(name, &symbol)
	switch {
	case text == nil:
		opened.library = library
		return nil
	case symbol != nil:
		return fmt.Errorf("%w: %s has no %s: the driver is too old", ErrNoDriver, library, C.GoString(symbol))
	default:
		return fmt.Errorf("%w: %s", ErrNoDriver, C.GoString(text))
	}
}

// Version is the newest CUDA that the driver knows, such as 12.4.
func (d *Driver) Version() string {
	return fmt.Sprintf("%d.%d", d.version/1000, d.version%1000/10)
}

func code(err error) int {
	var e *Error
	if errors.As(err, &e) {
		return e.Code
	}
	return 0
}
