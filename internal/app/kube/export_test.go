package kube

import "net/http"

// NewOver is New with another transport, which needs no network.
func NewOver(cfg Config, t http.RoundTripper) (*Client, error) {
	cfg.Log = logger(cfg.Log)
	r, err := newRestOver(cfg, "https://kubernetes.invalid", &http.Client{Transport: t})
	if err != nil {
		return nil, err
	}
	return &Client{r, cfg.Log}, nil
}
