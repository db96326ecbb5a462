// Package plainhttp makes the HTTP clients of all programs. They use no proxy and follow no redirect: their requests
// carry secrets, such as the job token, that are for the addressed server alone.
package plainhttp

import (
	"net"
	"net/http"
	"time"
)

// Defaults of a client, which set may change.
const (
	dialTimeout = 5 * time.Second
	idleTimeout = 30 * time.Second
	idlePerHost = 2
	maxHeader   = 64 << 10 // bytes of an answer's header
)

// New returns a client with connections of its own. set, unless it is nil, changes the transport before its first use;
// a proxy that it sets is not used.
func New(set func(*http.Transport)) *http.Client {
	t := &http.Transport{
		DialContext: (&net.Dialer{Timeout: dialTimeout}).DialContext, TLSHandshakeTimeout: dialTimeout,
		MaxIdleConnsPerHost: idlePerHost, IdleConnTimeout: idleTimeout, MaxResponseHeaderBytes: maxHeader,
		DisableCompression: true,
	}
	if set != nil {
		set(t)
	}
	t.Proxy = nil
	return &http.Client{Transport: t, CheckRedirect: refuse}
}

func refuse(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
