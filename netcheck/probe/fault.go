package probe

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"syscall"

	"dlrover-run/internal/text"
	"dlrover-run/netcheck"
)

// maxText bounds the text of a Result, in bytes.
const maxText = 512

// fault is why a test ended early.
type fault struct {
	class netcheck.Class
	text  string
}

func (f *fault) Error() string { return f.text }

func faultf(class netcheck.Class, format string, args ...any) *fault {
	return &fault{class, oneLine(fmt.Sprintf(format, args...))}
}

// oneLine is s as a Result or a Finding takes it.
func oneLine(s string) string { return text.Line(s, maxText) }

// The errors of the system by their meaning for the network.
var (
	ownErrors = []error{syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM, syscall.EADDRNOTAVAIL,
		syscall.EADDRINUSE, syscall.EACCES, syscall.EPERM, syscall.ENODEV, syscall.EAFNOSUPPORT, syscall.EINVAL}
	unreachableErrors = []error{syscall.EHOSTUNREACH, syscall.ENETUNREACH, syscall.ETIMEDOUT, syscall.ENETDOWN,
		syscall.EHOSTDOWN}
	resetErrors = []error{syscall.ECONNRESET, syscall.EPIPE, syscall.ECONNABORTED, io.EOF, io.ErrUnexpectedEOF,
		net.ErrClosed}
)

func isOneOf(err error, list []error) bool {
	return slices.ContainsFunc(list, func(e error) bool { return errors.Is(err, e) })
}

// connectClass classifies the error of a connect.
func connectClass(err error) netcheck.Class {
	switch {
	case errors.Is(err, context.Canceled):
		return netcheck.Canceled
	case errors.Is(err, syscall.ECONNREFUSED):
		return netcheck.Refused
	case isOneOf(err, ownErrors):
		return netcheck.Own
	case isOneOf(err, resetErrors):
		return netcheck.Reset
	}
	if _, ok := errors.AsType[*net.AddrError](err); ok { // IPv4 to IPv6
		return netcheck.Own
	}
	return netcheck.Unreachable // no route, or no answer in time
}

// brokenClass classifies the error of an open connection.
func brokenClass(err error) netcheck.Class {
	switch {
	case errors.Is(err, context.Canceled):
		return netcheck.Canceled
	case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, context.DeadlineExceeded),
		isOneOf(err, unreachableErrors):
		return netcheck.Stalled
	case isOneOf(err, ownErrors):
		return netcheck.Own
	}
	return netcheck.Reset
}

// asFault finds the fault in err, or makes one of a connection that broke while doing something.
func asFault(err error, doing string) *fault {
	if f, ok := errors.AsType[*fault](err); ok {
		return f
	}
	return faultf(brokenClass(err), "%s: %v", doing, err)
}

// gravity orders classes by their weight when rails of one test differ. News of the network count more than an end that
// could not do its part; a cancelled test counts most.
var gravity = []netcheck.Class{netcheck.OK, netcheck.Own, netcheck.Reset, netcheck.Stalled, netcheck.Auth,
	netcheck.Unreachable, netcheck.Refused, netcheck.MTU, netcheck.Canceled}

// worst is the fault that counts most, nil when there is none.
func worst(faults []*fault) *fault {
	var w *fault
	for _, f := range faults {
		if f != nil && (w == nil || slices.Index(gravity, f.class) > slices.Index(gravity, w.class)) {
			w = f
		}
	}
	return w
}
